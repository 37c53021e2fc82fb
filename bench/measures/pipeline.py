"""Our pipeline beside torch.distributed.pipelining: the time of a training step, schedule by schedule; and bubbles.

All arms take turns in the same processes. A step is forward and backward of all microbatches and the optimizer's
update; its time is that of rank 0, whose last backward is the last of the step under GPipe and 1F1B. The losses of the
first steps are compared: they agree to 1e-5, or there is no record.

A record has three parts besides: what each way to spread a model gives (``features.py``), the same on four GPUs by
formulas (``modelled.py``), and bubbles. These need no processes: every schedule runs against a clock, with equal
stages, beside the formula that it should meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from measures.features import FeatureProtocol, bench_features
from measures.modelled import model_features
from measures.pipeline_arms import PipelineArm, pipeline_arms, set_up_pipeline
from paceline.comm.base import Communicator
from paceline.errors import UsageError
from paceline.models.gpt import gpt_config
from paceline.run.function_ranks import run_processes
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import SCHEDULE_NAMES, make_schedule
from paceline_bench.arms import BenchWorkload, select
from paceline_bench.engines import MeasuredArm, check_losses
from paceline_bench.timing import Turns, interleave

PARTS = ("speed", "features", "modelled", "bubbles")
TOLERANCE = 1e-5
_WORKLOAD = BenchWorkload(model="gpt-11m", batch=8, context=128, tied=False)
_PROTOCOL = Turns(rounds=12, steps_per_turn=2, warm_up=3)
_FEATURE_PROTOCOL = FeatureProtocol()
_TIMEOUT_S = 3600.0
_CHUNKS = {"interleaved": 2, "zb-v": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWorkload:
    """What all arms train on, and in how many microbatches. Untied: torch's stages share no weights."""

    workload: BenchWorkload = _WORKLOAD
    microbatches: int = 8
    protocol: Turns = _PROTOCOL
    feature_protocol: FeatureProtocol = _FEATURE_PROTOCOL


def make_workload(
    model: str, context: int, microbatches: int, *, rounds: int | None = None, steps: int | None = None
) -> PipelineWorkload:
    """Returns what to train: one sample a microbatch. Raises UsageError for a size, or a context, that is not there."""
    longest = gpt_config(model).context
    if context > longest:
        raise UsageError(f"--context {context}: {model} reads {longest} tokens at most")
    default = PipelineWorkload()
    return PipelineWorkload(
        workload=BenchWorkload(model=model, batch=microbatches, context=context, tied=False),
        microbatches=microbatches,
        protocol=replace(default.protocol, rounds=rounds or default.protocol.rounds),
        feature_protocol=replace(default.feature_protocol, steps=steps or default.feature_protocol.steps),
    )


def bench_part(part: str, asked: PipelineWorkload, wanted: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Returns the rows of one part."""
    match part:
        case "speed":
            return bench_speed(asked, 2, wanted)
        case "features":
            return bench_features(asked.workload, asked.microbatches, asked.feature_protocol)
        case "modelled":
            return model_features()
        case _:
            return bench_bubbles()


def bench_speed(asked: PipelineWorkload, ranks: int, wanted: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Times our schedules against torch's on real Gloo ranks with one thread each."""
    arms = select(pipeline_arms(), wanted)
    by_rank = run_processes(_measure, ranks, args=(asked, arms), timeout_s=_TIMEOUT_S)
    measured = [_with_losses(each) for each in zip(*by_rank, strict=True)]
    check_losses(asked.workload, measured, TOLERANCE)
    return [_row(asked, arm, each, ranks) for arm, each in zip(arms, measured, strict=True)]


def bench_bubbles(ranks: Sequence[int] = range(2, 9), shares: Sequence[int] = (1, 2, 4)) -> list[dict[str, Any]]:
    """Runs every schedule of p ranks and p, 2p, 4p microbatches against a clock, beside its formula."""
    return [_bubble(name, p, share * p) for name in SCHEDULE_NAMES for p in ranks for share in shares]


def ideal_overhead(schedule: str, ranks: int, microbatches: int) -> float | None:
    """Returns idle time over work as the formula has it, None where it does not hold: too few microbatches."""
    parts = {"interleaved": _CHUNKS["interleaved"], "zb-h1": 3, "zb-v": 6}.get(schedule, 1)
    if schedule == "zb-v" and microbatches < 1.5 * ranks:
        return None
    return (ranks - 1) / (parts * microbatches)


def _measure(comm: Communicator, asked: PipelineWorkload, arms: Sequence[PipelineArm]) -> list[MeasuredArm]:
    num_losses = asked.protocol.warm_up
    steps = {arm.name: set_up_pipeline(arm, asked.workload, asked.microbatches, comm, num_losses) for arm in arms}
    peers = {arm.name: arm.peer for arm in arms}
    timings = interleave(steps, asked.protocol, baseline=peers, device=comm.device, meet=comm.barrier)
    return [MeasuredArm(timing=timing, losses=steps[timing.arm].losses) for timing in timings]


def _with_losses(by_rank: Sequence[MeasuredArm]) -> MeasuredArm:
    """Takes the times of rank 0, and the losses of a rank that knows them: torch's are on that of the last stage."""
    return replace(by_rank[0], losses=next(each.losses for each in by_rank if each.losses))


def _row(asked: PipelineWorkload, arm: PipelineArm, measured: MeasuredArm, ranks: int) -> dict[str, Any]:
    workload = asked.workload
    return {
        "part": "speed",
        "model": workload.model,
        "ranks": ranks,
        "backend": "shared_memory" if arm.runner == "shared memory" else "gloo",
        "schedule": arm.schedule,
        "batch": workload.batch,
        "microbatches": asked.microbatches,
        "context": workload.context,
        **measured.timing.to_json(),
        "items_per_s": round(workload.items / (measured.timing.median_ms / 1e3), 1),
        "loss": round(measured.losses[-1], 6),
        "loss_step": len(measured.losses),
    }


def _bubble(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    chunks = _CHUNKS.get(name, 1)
    measure = measure_schedule(make_schedule(name, ranks, microbatches, chunks))
    formula = ideal_overhead(name, ranks, microbatches)
    return {
        "part": "bubbles",
        "kind": "on the virtual clock, equal stages",
        "schedule": name,
        "ranks": ranks,
        "chunks": chunks,
        "microbatches": microbatches,
        "bubble": round(measure.bubble, 6),
        "bubble_formula": None if formula is None else round(formula / (1 + formula), 6),
        "overhead": round(measure.overhead, 6),
        "overhead_formula": None if formula is None else round(formula, 6),
        "most_in_flight": max(measure.in_flight),
        "most_in_flight_share": max(measure.in_flight_share),
    }
