"""``paceline predict`` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cluster.devices import Cluster, load_cluster
from paceline.predict.formulas.step import COMPOSED_P90

Call = Callable[..., Any]
CONFIG = """
name: small
model: {kind: gpt, layers: 2, heads: 2, width: 64, context: 32, dropout: 0.0}
data: {kind: synthetic_tokens, vocab_size: 128, context: 32, samples: 64}
train: {steps: 2, global_batch: 32, accumulate: 2}
optim: {kind: adamw, lr: 1e-3}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_a_step_is_told_part_by_part(call: Call, config: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = ("parallel.strategy=fsdp", "-c", "1x dgx-h100", "--price", "3", "--slow", "rank=2:1.5x")
    shown = call("predict", config, *words, "--trace", str(trace))
    assert (shown.code, shown.err) == (0, "")
    for part in ("step ", "tokens ", "MFU", "USD a step", "exposed", "backward", "all_gather", "framework", "fits"):
        assert part in shown.out
    assert "What binds: " in shown.out
    assert "What is least certain: " in shown.out
    assert "rank 2, which is 1.5x as slow" in shown.out
    assert "of rank 2, 1.5x as slow" in shown.out
    assert "in nine of ten runs of this kind" in shown.out
    assert "batch         32 samples: microbatch 2 x accumulate 2 x 8 data ranks" in shown.out
    assert "\nslowed " in shown.out  # beside compute, not a part of it
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"block 0 attention", "block 1 attention_backward"} <= names


def test_each_entry_names_the_rank_it_is_of(call: Call, config: str) -> None:
    words = ("predict", config, "parallel.strategy=fsdp", "-c", "1x dgx-h100", "--json")
    found = json.loads(call(*words, "--slow", "rank=2:1.5x").out)
    assert [(each["rank"], each["slowed"]) for each in found["stages"]] == [(0, 1.0), (2, 1.5)]
    # A step that waits for its hosts is as slow as the slowest of them.
    assert found["step_s"] > 1.3 * json.loads(call(*words).out)["step_s"]


def test_one_rank_is_said_not_to_shard(call: Call, config: str) -> None:
    shown = call("predict", config, "parallel.strategy=fsdp", "-c", "1x dgx-h100", "--ranks", "1")
    assert shown.out.startswith("parallel.strategy = fsdp runs as ddp: one rank has nobody to share its states with")
    assert ", ddp, " in shown.out.splitlines()[2]


def test_the_ranks_of_a_config_are_obeyed(call: Call, config: str) -> None:
    words = ("predict", config, "parallel.ranks=2", "-c", "1x dgx-h100", "--json")
    assert json.loads(call(*words).out)["ranks"] == 2
    assert json.loads(call(*words, "--ranks", "4").out)["ranks"] == 4


def test_a_band_that_nobody_earned_claims_nothing(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(
        "model: {kind: mlp, hidden_dim: 16}\n"
        "data: {kind: synthetic_classification, samples: 64, features: 8, classes: 4}\n"
        "train: {steps: 2, global_batch: 16}\n"
    )
    shown = call("predict", str(path), "-c", "1x dgx-h100")
    assert "nine of ten" not in shown.out
    assert "the band of runs outside what was calibrated" in shown.out
    found = json.loads(call("predict", str(path), "-c", "1x dgx-h100", "--json").out)
    assert found["step_s_high"] == pytest.approx(found["step_s"] * (1 + COMPOSED_P90))


@pytest.mark.exhaustive
def test_an_open_microbatch_is_the_largest_that_fits(call: Call, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Cluster:
        found = load_cluster(name)
        return replace(found, node=replace(found.node, device=replace(found.device, memory_bytes=memory)))

    words = ("train.accumulate=null", "-c", "1x dgx-h100", "--ranks", "2", "--json")
    totals = {}
    for size in (4, 16):
        found = json.loads(call("predict", config, *words, f"train.microbatch={size}").out)
        totals[size] = found["memory_bytes"]["total"]
    memory = (totals[4] + (totals[16] - totals[4]) / 6) / 0.9
    monkeypatch.setattr("paceline.cluster.devices.load_cluster", load)
    shown = call("predict", config, *words, "train.microbatch=auto")
    found = json.loads(shown.out)
    assert (shown.code, found["microbatch"], found["accumulate"]) == (0, 4, 4)
    memory = 1
    shown = call("predict", config, *words[:-1], "train.microbatch=auto")
    assert shown.code == 1
    assert "microbatch 1 x" in shown.out
    assert f"  paceline plan {config} --cluster '1x dgx-h100'" in shown.out


@pytest.mark.parametrize(
    "words", [("--ranks", "16"), ("parallel.ranks=16",), ("--slow", "rank=99:2x"), ("--price", "inf")]
)
def test_what_cannot_be_is_told_before_anything_is_recorded(
    call: Call, config: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.rehearse.prediction.record_stages", None)
    assert call("predict", config, "-c", "1x dgx-h100", *words).code == 2


def test_json_says_the_same_twice(call: Call, config: str) -> None:
    words = ("predict", config, "parallel.strategy=zero1", "-c", "1x dgx-h100", "--ranks", "4", "--json")
    shown = call(*words)
    found = json.loads(shown.out)
    assert found["ranks"] == 4
    assert found["step_s_low"] < found["step_s"] < found["step_s_high"]
    assert set(found["phases_s"]) == {"forward", "backward", "optimizer"}
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"], rel=0.01)
    assert sum(found["phases_s"].values()) == pytest.approx(found["step_s"], rel=0.01)
    assert found["memory_bytes"]["total"] == sum(v for k, v in found["memory_bytes"].items() if k != "total")
    assert call(*words).out == shown.out


def test_on_a_processor_the_loop_has_a_line_of_its_own(call: Call, config: str) -> None:
    words = ("predict", config, "parallel.strategy=ddp", "-c", "cpu-host", "--ranks", "2")
    assert "the next batch, times, records and hooks" in call(*words).out
    found = json.loads(call(*words, "--json").out)
    assert found["parts_s"]["loop"] == found["phases_s"]["loop"] > 0
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"], rel=0.01)


def test_a_pipeline_has_a_bubble(call: Call, config: str) -> None:
    words = ("parallel.pipeline=2", "-c", "1x dgx-h100", "--ranks", "4", "--json")
    found = json.loads(call("predict", config, *words).out)
    assert [each["stage"] for each in found["stages"]] == [0, 1]
    assert found["stages"][0]["bubble_s"] > 0
    assert {"send", "recv"} & set(found["communication_s"])


def test_a_rank_can_be_asked_for(call: Call, config: str) -> None:
    words = ("parallel.pipeline=2", "-c", "1x dgx-h100", "--ranks", "4", "--rank", "3")
    shown = call("predict", config, *words)
    assert shown.code == 0
    assert "of rank 3" in shown.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-c", "1x dgx-h1000"), "dgx-h100"),
        (("-c", "1x dgx-h100", "--ranks", "16"), "16 ranks on 1x dgx-h100"),
        (("-c", "1x dgx-h100", "--slow", "rank=99:2x"), "ranks are 0 to 7"),
        (("-c", "1x dgx-h100", "--rank", "8"), "ranks are 0 to 7"),
        (("-c", "1x dgx-h100", "parallel.ranks=3"), "train.global_batch = 32"),
        (("-c", "1x dgx-h100", "--price", "inf"), "--price inf"),
        (("-c", "1x dgx-h100", "--slow", "link=1:2x"), "paceline simulate"),
        (("-c", "cpu-host", "--longest", "model.kind=mlp", "data.kind=digits"), "model.heads"),
        (("-c", "cpu-host", "--longest", "--price", "3", "--trace", "t.json"), "--longest with --trace, --price"),
        (("-c", "cpu-host", "--host-gb", "4"), "--host-gb 4 without --longest"),
        (("--on", "tpu"), "take --on gpu"),
        (("--on", "gpu"), "name it: --cluster '1x dgx-h200'"),
        (("-c", "cpu-host", "--on", "gpu"), "--on gpu"),
        (("-c", "1x dgx-h100", "--on", "gpu", "--slow", "rank=0:2x"), "take --late MS"),
        (("-c", "1x dgx-h100", "--late", "2"), "--late 2 without --on gpu"),
        (("-c", "1x dgx-h100", "--on", "gpu", "--ranks", "8", "parallel.tensor=3"), "parallel.tensor"),
    ],
)
def test_what_cannot_be_is_told(call: Call, config: str, words: tuple[str, ...], told: str) -> None:
    shown = call("predict", config, *words)
    assert shown.code == 2
    assert told in shown.err


def test_what_does_not_fit_on_a_gpu_is_told_with_what_would(
    call: Call, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr("paceline.rehearse.emulate._device_for", lambda _: torch.device("cpu"))
    monkeypatch.setattr("paceline.rehearse.emulate._run", run_out)
    words = ("parallel.strategy=ddp", "-c", "1x dgx-h100", "--on", "gpu")
    shown = call("predict", config, *words)
    assert shown.code == 1
    assert "rank 0 does not fit: it ran out of memory" in shown.out
    assert "parallel.strategy=fsdp. What fits:" in shown.out
    shown = call("predict", config, *words, "--json")
    assert (shown.code, json.loads(shown.out)["fits"]) == (1, False)
    assert "What fits:" in shown.err


def test_what_is_open_is_decided_for_the_cluster(call: Call, config: str) -> None:
    shown = call("predict", config, "parallel.strategy=auto", "-c", "1x dgx-h100")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("auto takes ")


def test_the_longest_sequences_rung_by_rung(call: Call) -> None:
    path = str(Path(__file__).parents[2] / "configs/gpt_1b.yaml")
    words = ("predict", path, "-c", "h200", "--longest", "train.global_batch=1", "--host-gb", "64")
    shown, found = call(*words), json.loads(call(*words, "--json").out)
    assert shown.code == 0
    assert "The 2,048 tokens of this config need: nothing." in shown.out
    rungs = {each["label"]: each for each in found["rungs"]}
    assert all(f"{name} " in shown.out for name in rungs)
    assert rungs["nothing"]["tokens"] < rungs["MLPs in tiles"]["tokens"] < rungs["checkpoint full"]["tokens"]
    assert rungs["nothing"]["price"] == 0 < rungs["checkpoint full"]["price"] < 0.5
    assert "0: not even" not in shown.out
    assert "0: not even 1,024 tokens fit, in the memory" in call(*words[:-1], "8").out
    away = rungs["checkpoint full, MLPs in tiles, offload activations"]
    assert away["keys"]["memory.offload"] == ["activations"]
    assert 0.8 * 64 * 2**30 < away["host_bytes"] <= 0.9 * 64 * 2**30
