"""One rank of many run for real, with emulated links: what it sends is what the dry run says, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_cases import dry_config

from paceline.cluster.devices import load_cluster
from paceline.config import Config
from paceline.errors import UsageError
from paceline.rehearse.emulate import EmulatedStep, emulate
from paceline.rehearse.prediction import predict_decided

NODE = load_cluster("1x dgx-h100")
CPU = torch.device("cpu")


def run(config: Config, ranks: int = 4, **options: Any) -> EmulatedStep:
    config, predicted = predict_decided(config, NODE, ranks)
    return emulate(config.with_values("train", precision="fp32"), predicted, device=CPU, steps=2, **options)


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "ddp"},
        {"strategy": "zero2"},
        {"strategy": "fsdp"},
        {"strategy": "hybrid", "shard_ranks": 2},
        {"strategy": "ddp", "tensor": 2},
        {"strategy": "fsdp", "context": 2},
        {"strategy": "ddp", "pipeline": 2},
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_a_rank_sends_what_the_dry_run_says(parallel: dict[str, Any]) -> None:
    buckets = {"first_bucket_mb": 0.02}  # the last one is not cut on CPUs, where this runs, either
    config = dry_config(parallel=parallel, train={"precision": "fp32"}, comm=buckets)
    found = run(config)
    stages = {each.stage: each for each in found.predicted.times}
    assert [each.stage for each in found.ranks] == list(stages)
    for each in found.ranks:
        moved = {kind: size for kind, size in stages[each.stage].moved.items() if kind != "barrier"}
        assert {kind: traffic.num_bytes for kind, traffic in each.traffic.items()} == moved
        for kind, traffic in each.traffic.items():
            assert traffic.seconds == pytest.approx(stages[each.stage].communication[kind], rel=1e-6)
        assert each.seconds > 0
        assert each.exposed > 0


def test_it_tells_and_writes_a_time_line(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    found = run(dry_config(parallel={"strategy": "ddp", "pipeline": 2}), trace=path)
    assert any(each.get("name") == "aten::embedding" for each in json.loads(path.read_text())["traceEvents"])
    text = found.to_text()
    for line in ("emulated links; the kernels and the memory of this CPU; values mean nothing", "stage 1", "send"):
        assert line in text
    assert found.seconds == found.longest.seconds + found.bubble > found.longest.seconds
    told = found.to_json()
    assert told["fits"]
    assert told["ranks"][1]["rank"] == 2
    assert json.dumps(told)
    assert found.facts()["on"] == "CPU"


def test_a_model_that_does_not_fit_is_told_with_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr("paceline.rehearse.emulate._run", run_out)
    found = run(dry_config(parallel={"strategy": "ddp"}))
    assert "rank 0 does not fit" in found.to_text()
    assert not found.to_json()["fits"]
    assert "CUDA out of memory" in str(found.facts()["problem"])


def test_what_cannot_be_emulated_is_refused() -> None:
    config, predicted = predict_decided(dry_config(parallel={"strategy": "ddp"}), NODE, 4)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees no GPU here"):
            emulate(config, predicted)
    with pytest.raises(UsageError, match=r"comm\.algorithm = ring with --on gpu"):
        emulate(config.with_values("comm", algorithm="ring"), predicted, device=CPU)
