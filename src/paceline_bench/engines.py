"""Our engines beside torch's DDP and FSDP2, and beside the plain loop at world size 1.

World size 1 is the cost of the engine itself; several ranks add collectives, overlap and waiting. The losses of the
first steps are compared too: arms that compute different things must not be compared in speed.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.errors import TrainingError
from paceline.free_memory import MemoryGauge
from paceline.run.function_ranks import run_processes
from paceline_bench.arms import (
    SHARED,
    Arm,
    BenchWorkload,
    TrainingStep,
    arms_alone,
    arms_in_bf16,
    arms_on_ranks,
    select,
    set_up,
    sets_of,
)
from paceline_bench.timing import Timing, Turns, interleave

# How far two arms' losses may be apart: orders of summation in fp32; rounding to bf16 at other places.
FP32_TOLERANCE = 1e-4
BF16_TOLERANCE = 2e-2
_TIMEOUT_S = 3600.0

Wanted = Sequence[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredArm:
    """One arm: its times, the losses of its first steps, and on a GPU the most memory that it needs by itself."""

    timing: Timing
    losses: list[float]
    peak_bytes: int | None = None


def bench_fp32(workload: BenchWorkload, turns: Turns, ranks: int, wanted: Wanted = None) -> list[dict[str, Any]]:
    """Times our engines on processes with one thread each: on Gloo ranks against torch's, on one against the loop."""
    arms = select(arms_on_ranks(workload, ranks) if ranks > 1 else arms_alone(), wanted)
    if not arms:
        return []
    measured = run_processes(_measure, ranks, args=(arms, workload, turns), timeout_s=_TIMEOUT_S)[0]
    check_losses(workload, measured, FP32_TOLERANCE)
    return [row_of(workload, each, ranks, "gloo" if ranks > 1 else "none") for each in measured]


def bench_bf16(
    workload: BenchWorkload, turns: Turns, device: torch.device, wanted: Wanted = None, *, compiled: bool = True
) -> list[dict[str, Any]]:
    """Times our engines against torch's at world size 1 in bf16, compiled: what a GPU runs."""
    args = (workload, turns, wanted, compiled)
    if device.type == "cuda":  # a world of one for the peers, which do not work without a process group
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            measured = _measure_bf16(SoloCommunicator(device), *args)
        finally:
            dist.destroy_process_group()
    else:
        measured = run_processes(_measure_bf16, 1, args=args, timeout_s=_TIMEOUT_S)[0]
    check_losses(workload, measured, BF16_TOLERANCE)
    return [row_of(workload, each, 1, "none") for each in measured]


def _measure_bf16(
    comm: Communicator, workload: BenchWorkload, turns: Turns, wanted: Wanted, compiled: bool
) -> list[MeasuredArm]:
    found: list[MeasuredArm] = []
    for arms in sets_of(select(arms_in_bf16(), wanted)):
        found += _measure(comm, arms, workload, turns, compiled=compiled)
        clean_up(comm.device)
    return found


def clean_up(device: torch.device) -> None:
    """Frees memory, and compiled graphs: they would be made to take any size, and slower, when the next model comes."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(
    comm: Communicator, arms: Sequence[Arm], workload: BenchWorkload, turns: Turns, *, compiled: bool = False
) -> list[MeasuredArm]:
    """Sets the arms up one after another, lets them warm up, and times them in turns."""
    steps: dict[str, TrainingStep] = {}
    peaks: dict[str, int | None] = {}
    # Libraries of matrix products take what they work in, which stays, before the first arm is measured.
    small = torch.ones(16, 16, device=comm.device, requires_grad=True)
    (small @ small).sum().backward()  # type: ignore[no-untyped-call]
    for arm in arms:
        steps[arm.name], peaks[arm.name] = warm_up(arm, comm, workload, turns.warm_up, compiled)
    warm, peers = replace(turns, warm_up=0), {arm.name: arm.peer for arm in arms}
    return [
        MeasuredArm(timing=timing, losses=steps[timing.arm].losses, peak_bytes=peaks[timing.arm])
        for timing in interleave(steps, warm, baseline=peers, device=comm.device, meet=comm.barrier)
    ]


def warm_up(
    arm: Arm, comm: Communicator, workload: BenchWorkload, num_steps: int, compiled: bool
) -> tuple[TrainingStep, int | None]:
    """Sets an arm up and runs its first steps; returns the step, and on a GPU the arm's own peak memory."""
    gauge = MemoryGauge(comm.device)
    before = gauge.now_bytes()
    step = set_up(arm, workload, comm, num_steps, compiled=compiled)
    for _ in range(num_steps):
        step()
    if comm.device.type != "cuda":
        return step, None
    gauge.reset()
    step()
    return step, gauge.peak_bytes() - before


def check_losses(workload: BenchWorkload, measured: Sequence[MeasuredArm], tolerance: float) -> None:
    """Raises TrainingError if some arm's losses are not those of the first."""
    first = measured[0]
    for each in measured[1:]:
        for number, (ours, theirs) in enumerate(zip(each.losses, first.losses, strict=True)):
            if not math.isclose(ours, theirs, rel_tol=tolerance):
                raise TrainingError(
                    f"{workload.model}: in step {number} {each.timing.arm} has the loss {ours:.6g}, and "
                    f"{first.timing.arm} has {theirs:.6g}\n  arms agree, to {tolerance:g}\n  try paceline verify"
                )


def row_of(workload: BenchWorkload, measured: MeasuredArm, ranks: int, backend: str) -> dict[str, Any]:
    per_second = workload.items * ranks / (measured.timing.median_ms / 1e3)
    return {
        "model": workload.model,
        "ranks": ranks,
        "backend": "shared_memory" if measured.timing.arm.endswith(SHARED) else backend,
        "batch_per_rank": workload.batch,
        "context": workload.context,
        **measured.timing.to_json(),
        "items_per_s": round(per_second, 1),
        "loss": round(measured.losses[-1], 6) if measured.losses else None,
        "loss_step": len(measured.losses),
        "peak_bytes": measured.peak_bytes,
    }
