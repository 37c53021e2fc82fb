"""The GPU benchmark and the rating of steps, on a real device with tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm.traced import Trace
from paceline.records.meter import StepMeter
from paceline.records.records import StepRecord
from paceline.records.summary import read_run
from paceline_bench.gpu.arms import run_train
from paceline_bench.gpu.loops import ArmTurn, all_workloads, run_arm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # of torch's compiler, which differ by version
]
DEVICE = torch.device("cuda", 0)
TINY = replace(all_workloads()["gpt-tiny"], device="cuda")
IMAGES = replace(all_workloads()["resnet-tiny"], device="cuda")


def turn_of(workload: Any, arm: str, folder: Path) -> ArmTurn:
    file = str(workload.config_file(folder))
    return run_arm(arm, workload.model, "cuda", file, 8)


def test_compiled_loops_and_the_engine_train_the_same_gpt(tmp_path: Path) -> None:
    ours = turn_of(TINY, "paceline engine", tmp_path)
    assert ours.losses[-1] < 0.985 * ours.losses[0]
    for arm in ("plain autocast", "plain masters", "plain autocast graphs", "plain masters graphs"):
        torch.compiler.reset()
        theirs = turn_of(TINY, arm, tmp_path)
        assert theirs.losses == pytest.approx(ours.losses, rel=2e-2), arm
        assert theirs.peak_bytes is not None
        assert theirs.peak_bytes > 0


def test_compiled_loops_and_the_engine_train_the_same_images(tmp_path: Path) -> None:
    ours = turn_of(IMAGES, "paceline engine", tmp_path)
    for arm in ("plain autocast", "plain autocast channels last"):
        torch.compiler.reset()
        assert turn_of(IMAGES, arm, tmp_path).losses == pytest.approx(ours.losses, rel=5e-2), arm


def test_records_of_a_run_have_mfu_and_the_time_of_the_host(tmp_path: Path) -> None:
    file = TINY.config_file(tmp_path)
    run_train(TINY, file, tmp_path, TINY.overrides(20, precision="bf16"))
    attempt = read_run(tmp_path / "bench")[0][-1]
    run = attempt.run
    assert (run.unit, run.units_per_sample, run.compute) == ("tokens", 16.0, "bf16")
    assert run.flops_per_sample is not None
    assert all(step.host_s is not None and step.flops_per_s is not None for step in attempt.steps)
    if run.peak_flops is not None:  # the catalog has this GPU
        assert all(step.mfu is not None and 0 < step.mfu < 1 for step in attempt.steps)


def records_of(kernels: int, size: int, steps: int = 12) -> list[StepRecord]:
    """Times steps of so many products of one size, and of an update that is a few small kernels."""
    meter = StepMeter(DEVICE, Trace(DEVICE))
    left, small = torch.randn(size, size, device=DEVICE), torch.zeros(8, device=DEVICE)
    number = torch.zeros((), device=DEVICE)
    outcome = SimpleNamespace(loss_sum=number, count=1.0, grad_norm=number, loss_scale=None)
    meter.start()
    for step in range(1, steps + 1):
        meter.lap("data")
        for phase in ("forward", "backward"):
            for _ in range(kernels):
                left @ left
            meter.lap(phase)
        for _ in range(20):
            small.add_(1)
        meter.lap("optimizer")
        facts: Any = SimpleNamespace(step=step, epoch=0.0, position=step, lr=0.1, samples=1, outcome=outcome)
        meter.finish(facts)
    return list(meter.drain(wait=True))[2:]


def test_the_host_limits_small_kernels_and_not_large_ones() -> None:
    records_of(10, 64)
    small = records_of(300, 16)
    large = records_of(20, 4096)
    assert median(step.host_s / step.step_s for step in small if step.host_s is not None) > 0.5
    assert median(step.host_s for step in large if step.host_s is not None) == 0.0
