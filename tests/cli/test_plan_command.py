"""``paceline plan`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def test_scaling_tables(call: Call) -> None:
    shown = call("plan", CONFIG, "train.global_batch=16", "--cluster", "dgx-h100", "--gpus", "1,8")
    assert "strong scaling" in shown.out
    assert "weak scaling" in shown.out
    assert "out of memory" in shown.out
    words = ("train.global_batch=16", "--cluster", "dgx-h100", "--gpus", "4,8", "--json")
    found = json.loads(call("plan", CONFIG, *words).out)
    assert [row["devices"] for row in found["scaling"]["strong"]] == [4, 8]
    assert found["scaling"]["weak"][0]["efficiency"] == 1.0


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
    refused = call(*words, "--png", str(tmp_path / "scaling.docx"))
    assert refused.code == 2
    assert "cannot be drawn into" in refused.err
    nothing = call(
        "plan", CONFIG, "-c", "1x l4", "train.global_batch=1", "--gpus", "1", "--png", str(tmp_path / "no.png")
    )
    assert nothing.code == 1
    assert "is not drawn: no number of devices has a plan" in nothing.out
    assert not (tmp_path / "no.png").exists()


def test_nothing_fits(call: Call) -> None:
    shown = call("plan", CONFIG, "--cluster", "1x l4", "train.global_batch=1")
    assert shown.code == 1
    assert "out of memory: none of" in shown.out
    assert "nearest: ddp over 1" in shown.out


def test_a_hugging_face_model(call: Call, tmp_path: Path) -> None:
    path, plan = tmp_path / "config.json", tmp_path / "plan.yaml"
    path.write_text(json.dumps(LLAMA))
    shown = call("plan", "--hf", str(path), "--cluster", "4x a100-sxm-80gb", "-o", str(plan))
    assert shown.code == 0
    assert "assumed: a step of 1024 sequences" in shown.out
    assert load_config(plan).parallel.ranks == 4
    shown = call("plan", "train.global_batch=64", "data.context=2048", "--hf", str(path), "-c", "8x a100-sxm-80gb")
    assert "64 sequences of 2048 tokens" in shown.out
    assert "assumed" not in shown.out
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
        ((str(ROOT / "configs" / "digits.yaml"), "-c", "dgx-h100"), "is not a transformer"),
        ((CONFIG, "train.global_batch=16", "-c", "2x dgx-h100", "--gpus", "12"), "try 8 or 16"),
        ((CONFIG, "-c", "2x dgx-h100", "--gpus", "8,some"), "--gpus 1,2,4,8,16"),
        ((CONFIG, "-c", "2x dgx-h100", "--gpus", ","), "--gpus 1,2,4,8,16"),
        ((CONFIG, "-c", "2x dgx-h100", "--png", "s.png"), "add --gpus 8,16,32"),
        ((CONFIG, "-c", "2x dgx-h100", "--by", "cost"), "--by time"),
        ((CONFIG, "-c", "dgx-h100", "--hf", "config.json"), "a plan is for one model"),
        (("-c", "dgx-h100"), "name a config, or --hf"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: tuple[str, ...], message: str, call: Call) -> None:
    shown = call("plan", *words)
    assert shown.code == 2
    assert message in shown.err
