"""The twelve cases on emulated links, and NCCL on one GPU: their cases, what is made of measurements, and trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_runs import Call
from command_runs import call as call

from measures.emulated import CASES, LINKS, MODELS, best_rows, config_of
from measures.nccl import KINDS, WORKLOADS, cost_of
from measures.verbs import app
from paceline.cluster.devices import load_cluster
from paceline_bench.arms import BenchWorkload
from paceline_bench.traced_step import what_ran


def kernel(name: str, start_ms: float, end_ms: float, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}


def test_a_time_line_tells_when_the_gpu_waited_for_its_wires() -> None:
    events = [
        kernel("gemm", 10.0, 14.0),
        kernel("gemm", 13.0, 15.0),
        kernel("Memcpy DtoD", 15.005, 16.0, "gpu_memcpy"),  # too soon after to be a gap
        kernel("_hold_kernel", 12.0, 18.0),
        kernel("ncclDevKernel_AllReduce", 19.0, 19.5),
        kernel("adam", 20.0, 22.0),
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 50_000.0},
        {"ph": "M", "name": "process_name"},
    ]
    found = what_ran(events)
    assert (found["kernels"], found["gaps"]) == (3, 1)
    assert found["idle_ms"] == pytest.approx(4.005)
    assert found["waits_ms"] == pytest.approx(2.505)
    assert found["timeline"] == {"compute": [[0.0, 6.0], [10.0, 12.0]], "wires": [[2.0, 8.0], [9.0, 9.5]]}
    assert what_ran([kernel("_hold_kernel", 0.0, 1.0)]) == {}


def row(arm: str, step: float, exposed: float, peak: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "arm": arm, "compiled": True, "median_ms": step, "exposed_ms": exposed} | {
        "peak_bytes": peak,
        **more,
    }


def test_the_best_of_ours_stands_beside_the_best_of_torch() -> None:
    rows = [
        row("torch ddp", 10.0, 2.0, 100),
        row("paceline ddp", 9.0, 1.0, 90),
        row("paceline zero2", 9.5, 0.5, 50),
        row("torch fsdp2", 8.0, 0.0, 40),
        {"arm": "paceline fsdp", "error": "out of memory"},
    ]
    everything, replicated = best_rows(rows)
    assert (everything["ours"], everything["peer"]) == ("paceline ddp", "torch fsdp2")
    assert (everything["ratio"], everything["exposed_ratio"], everything["peak_ratio"]) == (1.125, None, 2.25)
    assert (replicated["ratio"], replicated["exposed_ratio"]) == (0.9, 0.5)
    assert best_rows(rows[-1:]) == []


def test_what_was_measured_prices_every_size() -> None:
    points = {kind: [(1000, 1.0), (2000, 3.0)] for kind in KINDS}
    ranks = (0, 1)
    sizes = (10, 1000, 1500, 2000, 3000)
    assert [cost_of(points, "all_reduce", size, ranks) for size in sizes] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert cost_of(points, "broadcast", 1500, ranks) == 2.0
    assert cost_of(points, "all_reduce", 1500, (0,)) == 0.0


@pytest.mark.parametrize("model", MODELS)
def test_a_case_is_the_model_that_its_name_says(model: str) -> None:
    params = {"124m": 124e6, "1.1b": 1.1e9, "7b": 3 * 202e6, "70b": 3 * 856e6}[model]
    workload = MODELS[model]
    shape = workload.gpt
    config = config_of(workload, 64, "fsdp", "cuda")
    assert config.model.kind == "gpt"
    for name in ("layers", "width", "mlp_width", "kv_heads", "vocab_size", "tied"):
        assert getattr(config.model, name) == getattr(shape, name)
    ends = 0 if model in ("124m", "1.1b") else 2 * shape.vocab_size * shape.width
    assert shape.params - ends == pytest.approx(params, rel=0.05)


def test_cases_are_four_models_on_three_networks() -> None:
    assert len(CASES) == 12
    rates = {name: (ranks, load_cluster(cluster)) for name, (ranks, cluster) in LINKS.items()}
    assert all(cluster.devices == ranks for ranks, cluster in rates.values())
    for name, gbit in (("64", 400), ("64-100g", 100)):
        between = rates[name][1].between
        assert between is not None
        assert between.bandwidth * 8 / between.cards == pytest.approx(gbit * 1e9)
    assert all(isinstance(each, BenchWorkload) and each.gpt.params > 0 for each in WORKLOADS.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["emulated", "--device", "cpu", "--cases", "124m/9"], "--cases 124m/9: they are 124m/8, 124m/64"),
        (["emulated", "--device", "cpu", "--arms", "horovod"], "--arms horovod: no arm is called so"),
        (["nccl", "--device", "cpu", "--ranks", "1"], "between two ranks and more there is something to send"),
        (["nccl", "--device", "tpu"], "--device tpu is not here"),
    ],
)
def test_what_there_is_not_is_refused(call: Call, arguments: list[str], message: str) -> None:
    called = call(*arguments, verbs=app)
    assert (called.code, called.out) == (2, "")
    assert message in called.err


@pytest.mark.exhaustive
def test_a_trial_writes_its_record_after_each_case(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--cases", "7b/8,7b/64", "--rounds", "2", "--arms", "ddp", "--strategies", "ddp"]
    called = call("emulated", *arguments, "--limit", "1", "--output", str(file), verbs=app)
    assert called.code == 0, called.err
    assert "left, for want of time: --cases 7b/64" in called.err
    record = json.loads(file.read_text())
    rows = {each["arm"]: each for each in record["rows"]}
    assert {each["case"] for each in record["rows"]} == {"7b/8"}
    assert rows["best, replicated"]["ratio"] > 0
    assert rows["paceline predict --on gpu, ddp"]["dry_run_ms"] > 0
    assert not [each for each in record["rows"] if "error" in each]


@pytest.mark.exhaustive
def test_a_trial_of_real_ranks_has_the_emulated_ones_beside_them(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    called = call(
        *("nccl", "--device", "cpu", "--models", "29m", "--ranks", "2", "--rounds", "2", "--arms", "paceline ddp"),
        *("--output", str(file)),
        verbs=app,
    )
    assert called.code == 0, called.err
    rows = {each["arm"]: each for each in json.loads(file.read_text())["rows"]}
    assert rows["paceline ddp bf16_master, emulated"]["peer"] == "paceline ddp bf16_master"
    assert len(rows["collectives"]["seconds"]["all_reduce"]) == 3
