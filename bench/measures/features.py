"""What each way to spread a model does to throughput and memory: the same model, the same batch, one row each.

Every row trains in fresh processes of its own, with the step that the trainer runs. Memory is told in two ways: the
tensors that are alive after backward, as ``memory.py`` counts them (parameters, gradients and optimizer state, with
what an engine keeps besides), and the most that the process ever had resident, beside what it had before the model was
built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from measures.memory import LiveTensors
from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import TrainingError
from paceline.free_memory import MemoryGauge
from paceline.plan.layout import StrategyName
from paceline.run.function_ranks import run_processes
from paceline.train.loss import CrossEntropy
from paceline.train.step import Passes, StepPolicy, accumulate, train_step
from paceline_bench.arms import SHARED, BenchWorkload
from paceline_bench.timing import quartiles, time_step

_TIMEOUT_S = 3600.0
_TOLERANCE = 1e-4  # of losses after some steps: orders of summation in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One way to spread a model."""

    name: str
    ranks: int = 2
    strategy: StrategyName = "ddp"
    pipeline: int = 1
    backend: Literal["gloo", "shared_memory"] = "gloo"


FEATURES = (
    Feature(name="one rank", ranks=1),
    Feature(name="pipeline, 1f1b", pipeline=2),
    Feature(name="zero2", strategy="zero2"),
    Feature(name="ddp"),
    Feature(name=f"ddp {SHARED}", backend="shared_memory"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureProtocol:
    """How many steps are timed, and how many run before."""

    steps: int = 12
    warm_up: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """What one rank says of its run."""

    times_s: list[float]
    loss: float
    tensor_bytes: int
    start_rss_bytes: int
    peak_rss_bytes: int


def bench_features(
    workload: BenchWorkload, microbatches: int, protocol: FeatureProtocol, features: Sequence[Feature] = FEATURES
) -> list[dict[str, Any]]:
    """Trains once in each way, and returns a row each."""
    rows = []
    for feature in features:
        args = (feature, workload, microbatches, protocol)
        by_rank = run_processes(_train, feature.ranks, args=args, timeout_s=_TIMEOUT_S)
        rows.append(_row(feature, workload, microbatches, by_rank))
    _check_losses(rows)
    return rows


def _train(
    comm: Communicator, feature: Feature, workload: BenchWorkload, microbatches: int, protocol: FeatureProtocol
) -> _Trained:
    if feature.backend == "shared_memory":
        comm = SharedMemoryCommunicator.join(comm)
    inputs, targets = workload.make_batch(comm.device, 0)  # the global batch, the same on every rank
    tensors, memory = LiveTensors("cpu"), MemoryGauge(comm.device)
    start_rss = memory.now_bytes()
    tensors.start()
    model = workload.make_model(comm.device)
    engine = parallelize(model, comm, feature.strategy, pipeline=feature.pipeline)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, fused=True)
    pairs: list[Any] = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
    # Of N ranks that share the batch, each takes every N-th microbatch.
    batch = StepBatch(microbatches=pairs[engine.comm.rank :: engine.comm.size], global_samples=len(inputs))
    loss, times = CrossEntropy(float(workload.context)), list[float]()
    step = partial(train_step, engine, optimizer, batch, loss, StepPolicy())
    for _ in range(protocol.warm_up + protocol.steps):
        comm.barrier()
        times.append(time_step(step, comm.device))
    peak_rss = memory.peak_bytes()  # before tensors are counted, which costs memory too

    def counted(passes: Passes) -> Any:
        values = accumulate(passes)
        tensors.note()
        return values

    outcome = step(passes=counted)
    return _Trained(
        times_s=times[protocol.warm_up :],
        loss=_global_loss(engine, outcome.loss_sum, outcome.count),
        tensor_bytes=tensors.peak_bytes,
        start_rss_bytes=start_rss,
        peak_rss_bytes=peak_rss,
    )


def _global_loss(engine: Engine, total: torch.Tensor, count: torch.Tensor | float) -> float:
    sums = torch.stack([total.detach().double(), torch.as_tensor(count).double()])
    engine.gradient_comm.all_reduce(sums).wait()
    return float(sums[0] / sums[1])


def _check_losses(rows: Sequence[dict[str, Any]]) -> None:
    """Raises TrainingError where a row has trained something else."""
    for row in rows:
        if not abs(row["loss"] - rows[0]["loss"]) <= _TOLERANCE * abs(rows[0]["loss"]):
            raise TrainingError(
                f"{row['feature']} ends with the loss {row['loss']}, and {rows[0]['feature']} with {rows[0]['loss']}\n"
                f"  rows compute the same, to {_TOLERANCE:g}, or their figures say nothing\n"
                "  find the first difference with `paceline verify`"
            )


def _row(feature: Feature, workload: BenchWorkload, microbatches: int, by_rank: Sequence[_Trained]) -> dict[str, Any]:
    times = by_rank[0].times_s
    low, middle, high = quartiles(times)
    ranks = "1 CPU rank" if feature.ranks == 1 else f"{feature.ranks} CPU ranks"
    return {
        "part": "features",
        "kind": f"measured, {ranks}",
        "feature": feature.name,
        "model": workload.model,
        "ranks": feature.ranks,
        "strategy": feature.strategy,
        "pipeline": feature.pipeline,
        "backend": feature.backend if feature.ranks > 1 else "none",
        "batch": workload.batch,
        "microbatches": microbatches,
        "context": workload.context,
        "samples_per_s": round(workload.batch / middle, 3),
        "step_ms": round(middle * 1e3, 3),
        "step_ms_low": round(low * 1e3, 3),
        "step_ms_high": round(high * 1e3, 3),
        "num_steps": len(times),
        "loss": round(by_rank[0].loss, 6),
        "tensor_bytes": [each.tensor_bytes for each in by_rank],
        "peak_rss_bytes": [each.peak_rss_bytes for each in by_rank],
        "start_rss_bytes": [each.start_rss_bytes for each in by_rank],
    }
