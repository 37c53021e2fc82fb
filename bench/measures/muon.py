"""A training step with Muon beside the same step with AdamW: what it costs that matrices are orthogonalised.

Newton-Schulz takes the same time whatever the batch, so the ratio falls as the batch grows: for matrices of width m and
T tokens in a step it is about 1 + 4 m / T, all ranks together. On the GPU a step has the 65,536 tokens that are one
GPU's share of the usual half million of GPT-124M; on two CPU ranks it has 8,192. Beside the time of a step a row has
the seconds that the ranks had a core for: on a CPU that other programs share, those tell the arms apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.config import OptimConfig
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.run.function_ranks import run_processes
from paceline.train.loss import CrossEntropy
from paceline.train.optim import build_optimizer
from paceline.train.step import StepPolicy, train_step
from paceline_bench.arms import BenchWorkload
from paceline_bench.timing import Turns, interleave

if TYPE_CHECKING:
    from paceline.plan.layout import StrategyName

_TIMEOUT_S = 3600.0
KINDS = ("adamw", "muon")


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonWorkload:
    """What both arms train: a rank's ``microbatches`` of a step, each of the workload's batch."""

    workload: BenchWorkload
    microbatches: int
    turns: Turns


CPU = {
    "gpt-mini": MuonWorkload(
        workload=BenchWorkload(model="gpt-mini", batch=16, context=256),
        microbatches=1,
        turns=Turns(rounds=8, steps_per_turn=1, warm_up=1),
    ),
    "gpt-11m": MuonWorkload(
        workload=BenchWorkload(model="gpt-11m", batch=16, context=256),
        microbatches=2,
        turns=Turns(rounds=6, steps_per_turn=1, warm_up=1),
    ),
}
CUDA = {
    "gpt-124m": MuonWorkload(
        workload=BenchWorkload(model="gpt-124m", batch=32, context=1024),
        microbatches=2,
        turns=Turns(rounds=10, steps_per_turn=4, warm_up=4),
    )
}


def bench_muon(
    asked: MuonWorkload, ranks: int, strategy: str, device: torch.device | None = None
) -> list[dict[str, Any]]:
    """Times both arms in turns: on Gloo ranks with one thread each, or on one GPU in bf16 with fp32 masters."""
    if device is None:
        rows: list[dict[str, Any]] = run_processes(_time, ranks, args=(asked, strategy, "fp32"), timeout_s=_TIMEOUT_S)[
            0
        ]
        return rows
    torch.cuda.set_device(device)
    return _time(SoloCommunicator(device), asked, strategy, "bf16_master")


def _time(comm: Communicator, asked: MuonWorkload, strategy: str, precision: str) -> list[dict[str, Any]]:
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    arms = {kind: _counted(_step(comm, asked, strategy, precision, kind), spent[kind]) for kind in KINDS}
    timings = interleave(arms, asked.turns, baseline="adamw", device=comm.device, meet=comm.barrier)
    tokens = asked.workload.items * asked.microbatches * comm.size
    processor_s = _processor_seconds(comm, spent, asked.turns.warm_up)
    return [
        {
            "model": asked.workload.model,
            "ranks": comm.size,
            "strategy": strategy,
            "precision": precision,
            "tokens": tokens,
            **timing.to_json(),
            "items_per_s": round(tokens / (timing.median_ms / 1e3), 1),
            "processor_ms": round(1e3 * processor_s[timing.arm], 1),
            "processor_ratio": round(processor_s[timing.arm] / processor_s["adamw"], 4),
        }
        for timing in timings
    ]


def _counted(step: Callable[[], None], spent: list[float]) -> Callable[[], None]:
    """Returns a step that notes the seconds that this process had a core for, which other programs do not change."""

    def run() -> None:
        before = time.process_time()
        step()
        spent.append(time.process_time() - before)

    return run


def _processor_seconds(comm: Communicator, spent: Mapping[str, Sequence[float]], warm_up: int) -> dict[str, float]:
    """Returns each arm's seconds of a step on a core: the median of its steps, added up over the ranks."""
    medians = [statistics.median(spent[kind][warm_up:]) for kind in KINDS]
    total = torch.tensor(medians, dtype=torch.float64, device=comm.device)
    comm.all_reduce(total).wait()
    return dict(zip(KINDS, total.tolist(), strict=True))


def _step(comm: Communicator, asked: MuonWorkload, strategy: str, precision: str, kind: str) -> Callable[[], None]:
    """Sets an arm up, with the optimizer that a config of this kind gets; returns its step."""
    workload, is_cuda = asked.workload, comm.device.type == "cuda"
    options: dict[str, Any] = {"precision": precision, "compile": "blocks" if is_cuda else "none"}
    engine = parallelize(workload.make_model(comm.device), comm, cast("StrategyName", strategy), **options)
    optimizer = build_optimizer(OptimConfig(kind=kind, lr=1e-4), engine.named_parameters(), engine)
    engine.check_optimizer(optimizer)
    batches: list[Any] = [
        workload.make_batch(comm.device, comm.rank * asked.microbatches + number)
        for number in range(asked.microbatches)
    ]
    batch = StepBatch(
        microbatches=batches,
        local_samples=[workload.batch] * asked.microbatches,
        global_samples=workload.batch * asked.microbatches * comm.size,
    )
    loss = CrossEntropy(float(workload.context), compiles=is_cuda)
    step = partial(train_step, engine, optimizer, batch, loss, StepPolicy(clip_norm=1.0))

    def run() -> None:
        step()

    return run
