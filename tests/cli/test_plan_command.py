"""``paceline plan`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.forecast import _series
from paceline.config import load_config

Call = Callable[..., Any]
ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "gpt_7b.yaml")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}

ALONE = """
import sys
sys.argv = ["paceline", "plan", sys.argv[1], "train.global_batch=32", "--cluster", "dgx-h100", "--json"]
try:
    import paceline.cli.main
    paceline.cli.main.main()
finally:
    print(*sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


def test_planning_needs_no_torch_and_says_the_same_twice(call: Call) -> None:
    shown = subprocess.run([sys.executable, "-c", ALONE, CONFIG], capture_output=True, text=True, check=False)
    assert shown.stderr.strip() == ""
    found = json.loads(shown.stdout)
    assert found["devices"] == 8
    assert len(found["plans"]) == len(found["explanations"]) == 5
    first = found["plans"][0]
    assert first["step_s_low"] < first["step_s"] < first["step_s_high"]
    assert first["memory_bytes"] <= found["budget_bytes"]
    assert first["fitted"] is True
    assert sum(found["left_out"].values()) + found["fit"] == found["looked_at"]
    assert found["as_written"]["fits"] is False
    assert found["changes_that_fit"]
    assert call("plan", CONFIG, "train.global_batch=32", "--cluster", "dgx-h100", "--json").out == shown.stdout


def test_the_first_plan_is_written(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    shown = call("plan", CONFIG, "train.global_batch=32", "-c", "2x dgx-h100", "-o", str(path), "--top", "3")
    assert "memory is by formula; paceline predict shows the same" in shown.out
    assert shown.code == 0
    for part in ("6.7B parameters, 32 sequences", "ways looked at", "1: ", "3: ", "docs/prediction.md", "as written"):
        assert part in shown.out
    config = load_config(path)
    assert config.parallel.ranks == 16
    assert config.train.global_batch == 32
    assert path.read_text().startswith("# Planned for 2x dgx-h100")
    nowhere = call(
        "plan", CONFIG, "train.global_batch=16", "-c", "2x dgx-h100", "-o", str(tmp_path / "none" / "plan.yaml")
    )
    assert nowhere.code == 2
    assert "cannot be written" in nowhere.err


@pytest.mark.exhaustive
def test_scaling_tables(call: Call) -> None:
    shown = call("plan", CONFIG, "train.global_batch=16", "--cluster", "dgx-h100", "--gpus", "1,8")
    assert "strong scaling" in shown.out
    assert "weak scaling" in shown.out
    assert "out of memory" in shown.out
    words = ("train.global_batch=16", "--cluster", "dgx-h100", "--gpus", "4,8", "--json")
    found = json.loads(call("plan", CONFIG, *words).out)
    assert [row["devices"] for row in found["scaling"]["strong"]] == [4, 8]
    assert found["scaling"]["weak"][0]["efficiency"] == 1.0


@pytest.mark.some(1)
@pytest.mark.exhaustive
def test_scaling_is_drawn_as_predicted(call: Call, tmp_path: Path) -> None:
    words = ("plan", CONFIG, "train.global_batch=16", "--cluster", "dgx-h100", "--gpus", "1,8")
    shown = call(*words, "--png", str(tmp_path / "scaling.png"))
    assert f"drawn into {tmp_path / 'scaling.png'}" in shown.out
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    for name in ("one.svg", "two.svg"):
        assert json.loads(call(*words, "--json", "--png", str(tmp_path / name)).out)["devices"] == 8
    drawn = (tmp_path / "one.svg").read_text()
    assert "predicted, not measured" in drawn
    assert "predicted efficiency" in drawn
    assert drawn == (tmp_path / "two.svg").read_text()
    words = ("plan", CONFIG, "-c", "1x l4", "train.global_batch=1", "--gpus", "1", "--host-gb", "16")
    nothing = call(*words, "--png", str(tmp_path / "no.png"))
    assert nothing.code == 1
    assert "is not drawn: no number of devices has a plan" in nothing.out
    assert not (tmp_path / "no.png").exists()


@pytest.mark.exhaustive
def test_costs(call: Call) -> None:
    words = ("plan", CONFIG, "train.global_batch=16", "--cluster", "dgx-h100", "--gpus", "4,8", "--by", "cost")
    shown = call(*words)
    assert "h/B tokens" in shown.out
    assert "cheapest of these, with the same batch:" in shown.out
    found = json.loads(call(*words, "--price", "3", "--json").out)
    first = found["plans"][0]
    assert first["cost"]["per_step"] == pytest.approx(3 * 8 * first["step_s"] / 3600)
    assert first["cost"]["per_billion"] == pytest.approx(3 * 8 * 1e9 / first["tokens_per_s"] / 3600)
    assert found["order"] == "cost"
    assert "$/B tokens" in call(*words, "--price", "3").out


def test_where_the_step_and_the_memory_go(call: Call) -> None:
    found = json.loads(call("plan", CONFIG, "train.global_batch=16", "-c", "dgx-h100", "--json").out)
    for plan in found["plans"]:
        parts = {name: value for name, value in plan["parts_s"].items() if name != "hidden"}
        assert sum(parts.values()) == pytest.approx(plan["step_s"])
        assert set(plan["memory_by_category"]) == {
            *("parameters", "gradients", "optimizer", "activations", "buffers", "temporary", "framework"),
            "at_other_times",
        }
        assert sum(plan["memory_by_category"].values()) <= plan["memory_bytes"] * 1.0001
        assert plan["exposed_s"] >= plan["parts_s"]["exposed"]


def test_an_open_precision(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    words = ("plan", str(ROOT / "configs" / "gpt_small.yaml"), "-c", "dgx-h100", "--precision", "auto", "-o", str(path))
    shown = call(*words, "--json")
    first = json.loads(shown.out)["plans"][0]
    assert first["precision"] == "bf16_master"
    assert load_config(path).train.precision == "bf16_master"
    old = json.loads(call("plan", *words[1:2], "-c", "8x v100-sxm2-16gb", "--precision", "auto", "--json").out)
    assert old["plans"][0]["precision"] == "fp16"  # it has no units for bf16


def test_nothing_fits(call: Call) -> None:
    shown = call("plan", CONFIG, "--cluster", "1x l4", "train.global_batch=1", "--host-gb", "16")
    assert shown.code == 1
    assert "out of memory: none of" in shown.out
    assert "nearest: ddp over 1" in shown.out
    assert "1 more memory than the host has" in shown.out
    larger = call("plan", CONFIG, "--cluster", "1x l4", "train.global_batch=1")
    assert larger.code == 0
    assert "offload optimizer and parameters" in larger.out
    assert "of each rank in its host's memory" in larger.out


def test_a_config_that_offloads_more_than_a_host_holds(call: Call) -> None:
    changes = ("parallel.strategy=fsdp", "memory.offload=[optimizer]", "train.microbatch=1", "train.global_batch=8")
    words = ("plan", CONFIG, *changes, "--cluster", "dgx-h100")
    assert json.loads(call(*words, "--host-gb", "512", "--json").out)["as_written"]["fits"] is True
    shown = call(*words, "--host-gb", "32")
    assert "out of memory of the host, needs 1" in shown.out
    assert " and 32.0 GiB may be taken" in shown.out
    assert "  fits with " in shown.out


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,2,4,...,64", [1, 2, 4, 8, 16, 32, 64]),
        ("8,16,24,...,48", [8, 16, 24, 32, 40, 48]),
        ("1, 2, 3, ..., 5,8", [1, 2, 3, 4, 5, 8]),
        ("8,8", [8, 8]),
        ("1,2,...,3", [1, 2, 3]),
        ("1,...,8", []),
        ("1,2,...", []),
        ("1,2,...,2", []),
        ("4,2,...,8", []),
        ("1,2,...,...,8", []),
        ("eight", []),
        ("-8", []),
    ],
)
def test_numbers_of_devices_may_go_on(text: str, numbers: list[int]) -> None:
    assert _series(text.split(",")) == numbers


def test_a_picture_is_known_by_its_ending_before_anything_is_planned(call: Call, tmp_path: Path) -> None:
    shown = call("plan", CONFIG, "--cluster", "dgx-h100", "--gpus", "8", "--png", str(tmp_path / "s.docx"))
    assert shown.code == 2
    assert "its name ends in .png, .svg, .pdf" in shown.err
    assert "try s.png" in shown.err


def test_a_hugging_face_model(call: Call, tmp_path: Path) -> None:
    path, plan = tmp_path / "config.json", tmp_path / "plan.yaml"
    path.write_text(json.dumps(LLAMA))
    shown = call("plan", "--hf", str(path), "--cluster", "4x a100-sxm-80gb", "-o", str(plan))
    assert shown.code == 0
    assert "assumed: a step of 1024 sequences" in shown.out
    assert load_config(plan).parallel.ranks == 4
    shown = call("plan", "train.global_batch=64", "data.context=2048", "--hf", str(path), "-c", "8x a100-sxm-80gb")
    assert "64 sequences of 2048 tokens" in shown.out
    assert "assumed: bf16_master (train.precision)\n" in shown.out
    path.write_text(json.dumps({**LLAMA, "model_type": "bert"}))
    small = ("plan", "train.global_batch=16", "--hf", str(path), "-c", "dgx-a100")
    assert call(*small).code == 0
    refused = call(*small, "-o", str(plan))
    assert refused.code == 2
    assert "both directions" in refused.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((CONFIG, "-c", "4x dgx-h10"), "did you mean dgx-h100"),
        ((str(ROOT / "configs" / "digits.yaml"), "train.global_batch=12", "-c", "dgx-h100"), "or 6 devices"),
        ((CONFIG, "-c", "dgx-h100", "--price", "-1"), "it is in dollars, and above 0"),
        ((CONFIG, "-c", "dgx-h100", "--host-gb", "0"), "leave it out where it is not known"),
        ((CONFIG, "-c", "dgx-h100", "--precision", "bf61"), "did you mean bf16"),
        ((CONFIG, "train.global_batch=16", "-c", "2x dgx-h100", "--gpus", "12"), "try 8 or 16"),
        ((CONFIG, "-c", "2x dgx-h100", "--gpus", "8,some"), "--gpus 1,2,4,8,16"),
        ((CONFIG, "-c", "2x dgx-h100", "--gpus", ","), "--gpus 1,2,4,8,16"),
        ((CONFIG, "-c", "2x dgx-h100", "--png", "s.png"), "add --gpus 8,16,32"),
        ((CONFIG, "-c", "2x dgx-h100", "--by", "money"), "ranked by time, cost, memory"),
        ((CONFIG, "-c", "dgx-h100", "--hf", "config.json"), "a plan is for one model"),
        (("-c", "dgx-h100"), "name a config, or --hf"),
        (("-c", "dgx-h100", "--hf", CONFIG), "name a file that ends in .json"),
        (("-c", "dgx-h100", "--hf", str(ROOT / "configs")), "configs/config.json cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: tuple[str, ...], message: str, call: Call) -> None:
    shown = call("plan", *words)
    assert shown.code == 2
    assert message in shown.err
