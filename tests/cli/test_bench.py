"""``paceline bench`` as typed: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_bench.arms import CPU_WORKLOADS

Call = Callable[..., Any]

RECORD = {"name", "command", "rows", "config", "hardware", "versions", "commit", "time"}
ENGINE_ROW = {
    *("model", "ranks", "backend", "batch_per_rank", "context", "arm", "peer", "median_ms", "spread_ms", "ratio"),
    *("ratio_low", "ratio_high", "num_steps", "items_per_s", "loss", "loss_step", "peak_bytes"),
}


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of few steps: how long they last is no matter here."""
    workload, protocol = CPU_WORKLOADS["mlp"]
    monkeypatch.setitem(CPU_WORKLOADS, "mlp", (workload, replace(protocol, steps_per_turn=2, warm_up=4)))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("short_turns")
def test_engines_prints_and_writes_one_record_in_which_all_arms_agree(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    called = call("bench", "engines", "--models", "mlp", "--rounds", "2", "--json", "--output", str(file))
    assert called.code == 0, called.err
    record = json.loads(called.out)
    assert set(record) == RECORD
    assert record["command"] == "paceline bench engines --models mlp --rounds 2 --json"
    assert json.loads(file.read_text())["rows"] == record["rows"]
    assert all(set(row) == ENGINE_ROW for row in record["rows"])
    assert [(row["ranks"], row["arm"]) for row in record["rows"]] == [
        (2, "paceline ddp"),
        (2, "torch ddp"),
        (2, "torch ddp, gradient_as_bucket_view"),
        (2, "torch ddp on our group"),
        (2, "paceline zero1"),
        (2, "paceline zero2"),
        (2, "paceline fsdp"),
        (2, "torch fsdp2"),
        (2, "torch fsdp2 on our group"),
        (2, "paceline ddp shared memory"),
        (2, "paceline zero1 shared memory"),
        (2, "paceline zero2 shared memory"),
        (2, "paceline fsdp shared memory"),
        (2, "torch fsdp2 root only"),
        (1, "plain loop"),
        (1, "paceline ddp"),
        (1, "paceline fsdp"),
    ]
    for ranks in (1, 2):
        losses = [row["loss"] for row in record["rows"] if row["ranks"] == ranks]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert all(row["ratio"] == 1.0 for row in record["rows"] if row["arm"] == row["peer"])


@pytest.mark.usefixtures("short_turns")
def test_engines_shows_a_table_of_the_arms_asked_for(call: Call) -> None:
    called = call("bench", "engines", "--models", "mlp", "--rounds", "2", "--arms", "plain")
    assert called.code == 0, called.err
    assert "plain loop" in called.out
    assert "paceline" not in called.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engines", "--device", "tpu"], "--device tpu is not here"),
        (["gpu", "--device", "tpu"], "--device tpu is not here"),
        (["gpu", "--device", "cpu", "--models", "gpt-9t"], "--models gpt-9t: on cpu they are gpt-tiny, resnet-tiny"),
        (["gpu", "--device", "cpu", "--arms", "deepspeed"], "--arms deepspeed: no arm is called so"),
        (["engines", "--models", "gpt-9t"], "--models gpt-9t: on cpu they are mlp, gpt-11m"),
        (["engines", "--arms", "deepspeed"], "--arms deepspeed: no arm is called so"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    call: Call, arguments: list[str], message: str
) -> None:
    called = call("bench", *arguments)
    assert called.code == 2
    assert message in called.err


def test_a_benchmark_of_the_authors_is_told_where_it_is(call: Call) -> None:
    called = call("bench", "muon", "--rounds", "2")
    assert (called.code, called.out) == (2, "")
    assert called.err.splitlines() == [
        "paceline: paceline bench muon: there is no such benchmark",
        "  they are scaling, engines, comm, gpu",
        "  what Paceline's authors measure is in its repository: python bench --help",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_time(call: Call) -> None:
    called = call("bench", "gpu")
    assert called.code == 2
    assert "--device cuda is not here\n  run it where torch reaches a GPU" in called.err
    assert "--device cpu" in called.err


@pytest.mark.exhaustive
def test_the_whole_benchmark_runs_on_a_cpu(call: Call, tmp_path: Path) -> None:
    """All arms in processes of their own, ``paceline train`` among them; the loops traced by torch's compiler."""
    file = tmp_path / "gpu.json"
    words = ["bench", "gpu", "--device", "cpu", "--models", "gpt-tiny", "--rounds", "2", "--output", str(file)]
    called = call(*words)
    assert called.code == 0, called.err
    rows = {row["arm"]: row for row in json.loads(file.read_text())["rows"]}
    assert "torchao is not installed" in rows["torchao fp8"]["error"]
    for name in ("plain autocast", "plain masters", "paceline engine", "paceline train"):
        assert rows[name]["loss"] == pytest.approx(rows["plain autocast"]["loss"], rel=2e-2), rows[name]
        assert rows[name]["first_step_s"] > 0
        assert rows[name]["tflops"] is not None
    assert rows["paceline train"]["peer"].startswith("plain ")
    assert "paceline train" in called.out
