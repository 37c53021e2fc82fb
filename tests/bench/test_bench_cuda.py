"""The benchmarks' GPU paths, on small models."""

from __future__ import annotations

import pytest
import torch

from measures.memory import OPTIONS, Budget, Family, Option, bench_memory
from paceline.units import GIB, MIB
from paceline_bench.arms import BenchWorkload, arms_in_bf16
from paceline_bench.engines import bench_bf16
from paceline_bench.timing import Turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # of torch's compiler and process groups, which differ by version
]
DEVICE = torch.device("cuda", 0)


def test_all_arms_run_and_their_memory_is_counted_apart() -> None:
    workload = BenchWorkload(model="gpt-micro", batch=2, context=64)
    rows = bench_bf16(workload, Turns(rounds=2, steps_per_turn=1, warm_up=2), DEVICE, compiled=False)
    assert [row["arm"] for row in rows] == [arm.name for arm in arms_in_bf16()]
    peaks = [row["peak_bytes"] for row in rows]
    assert min(peaks) > 0
    assert max(peaks) < 3 * min(peaks)  # were the others counted too, the last would have many times the first


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_largest_model_runs_out_of_the_memory_that_it_is_given(option: Option) -> None:
    budget = Budget(device_bytes=256 * MIB, host_bytes=GIB, max_layers=40)
    before = torch.cuda.memory_allocated(DEVICE)
    row = bench_memory(option, Family(size="gpt-11m", context=256), budget, DEVICE)
    assert 0 < row["device_bytes"] <= budget.device_bytes
    assert row["layers"] > 0
    assert (row["host_bytes"] > 10 * row["parameters"]) == bool(row["offload"])
    assert torch.cuda.memory_allocated(DEVICE) - before < 128 * MIB  # the workspace of matrix products stays
