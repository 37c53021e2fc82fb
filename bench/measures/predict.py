"""Predicted beside measured: step time, and on a GPU peak memory, of real training steps on this machine.

    config --dryrun--> program --planner.replay--> predicted        on an entry of this machine (paceline calibrate)
    config --train_step on real ranks--> measured                    median over steps of the slowest rank

An arm is a model, a strategy and a way to talk or to compile. Each is predicted before it is measured; one that fails
has its error in its row, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from paceline.calibrate.entry import entry_of
from paceline.calibrate.machine import Wanted, combine_ranks, measure_rank
from paceline.cluster.devices import Catalog, Cluster, load_cluster
from paceline.cluster.entries import read_catalog, shipped
from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, config_batch, config_from_dict, layout_of
from paceline.data.loader import StepBatch
from paceline.data.registry import data_of
from paceline.engines.apply import parallelize
from paceline.free_memory import MemoryGauge
from paceline.models.gpt import gpt_config
from paceline.models.registry import build_model
from paceline.predict.replay.kernel_costs import kernel_seconds
from paceline.predict.replay.program import Program
from paceline.predict.replay.replay import replay
from paceline.rehearse.dryrun.record import record_stages
from paceline.run.function_ranks import run_processes
from paceline.train.assemble import build_policy
from paceline.train.loss import build_loss
from paceline.train.optim import build_optimizer
from paceline.train.step import train_step
from paceline_bench.arms import CPU_WORKLOADS, CUDA_WORKLOADS, BenchWorkload
from paceline_bench.engines import clean_up
from paceline_bench.timing import quartiles, time_step

_SAMPLES = 64
_WARM_UP = 5
_GPU = torch.device("cuda", 0)
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictArm:
    """What is trained and how. ``backend``: gloo or shared_memory between ranks, none for one rank alone."""

    model: str
    strategy: str
    backend: str = "none"
    ranks: int = 1
    is_compiled: bool = False
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """What it is called in tables."""
        how = self.backend if self.ranks > 1 else f"{self.precision} {'compiled' if self.is_compiled else 'eager'}"
        return f"{self.strategy} {how}"


def arms_on(device: str) -> list[PredictArm]:
    """Returns the arms of a device: eager ones first, since compiling takes longest."""
    if device == "cuda":
        return [
            PredictArm(model=model, strategy=strategy, is_compiled=is_compiled, precision="bf16")
            for is_compiled in (False, True)
            for model in CUDA_WORKLOADS
            for strategy in ("ddp", "fsdp")
        ]
    return [
        PredictArm(model=model, strategy=strategy, backend=backend, ranks=2)
        for model in CPU_WORKLOADS
        for strategy in ("ddp", "zero1", "fsdp")
        for backend in ("gloo", "shared_memory")
    ]


def only(arms: list[PredictArm], models: list[str], words: list[str]) -> list[PredictArm]:
    """Returns the arms of these models whose name contains one of the words; all of them without words."""
    return [arm for arm in arms if arm.model in models and (not words or any(word in arm.name for word in words))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """What arms are predicted on: ``measured`` says when and with what."""

    name: str
    plain: Cluster
    gloo: Cluster
    measured: str = ""

    def of(self, arm: PredictArm) -> Cluster:
        """Returns the cluster of an arm: as many devices as it has ranks, joined as it talks."""
        found = self.gloo if arm.backend == "gloo" else self.plain
        return replace(found, node=replace(found.node, devices=arm.ranks), nodes=1)


def clusters(device: str, name: str | None, entry: Path | None, tell: Callable[[str], None]) -> Clusters:
    """Finds what to predict on: a named entry, a file of one, or on a GPU what is measured now."""
    if name is None and device == "cuda":
        text = _calibrated(tell)
        if entry is not None:
            entry.write_text(text, encoding="utf-8")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "measured.yaml"
            path.write_text(text, encoding="utf-8")
            found = load_cluster(str(path))
        return Clusters(name=found.device.name, plain=found, gloo=found, measured=text.splitlines()[0].strip("# "))
    chosen = name or "cpu-host"
    plain = load_cluster(chosen)
    return Clusters(name=chosen, plain=plain, gloo=_over_gloo(chosen, plain))


def _over_gloo(name: str, plain: Cluster) -> Cluster:
    """The node of the same entry whose link is Gloo's; the plain one where there is none."""
    path = Path(name)
    entries = shipped() if path.suffix not in (".yaml", ".yml") else shipped().with_file(read_catalog(path))
    other = f"{plain.node.name}-gloo"
    return replace(plain, node=Catalog(entries=entries).node(other)) if other in entries.nodes else plain


def _calibrated(tell: Callable[[str], None]) -> str:
    """Measures this process's GPU; noise is taken, and written down."""
    started = time.perf_counter()
    wanted = Wanted(device="cuda", ranks=1, accepts_noise=True)
    measured = combine_ranks([measure_rank(SoloCommunicator(_GPU), wanted)], wanted, threads=1)
    tell(f"measured this GPU in {time.perf_counter() - started:.0f} s; samples spread by {100 * measured.spread:.1f} %")
    clean_up(_GPU)
    return entry_of(measured, "python bench predict --device cuda", torch.__version__)[1]


def config_of(arm: PredictArm, device: str) -> Config:
    """Returns the config of an arm: what ``paceline train`` would be given."""
    workload: BenchWorkload = (CUDA_WORKLOADS if device == "cuda" else CPU_WORKLOADS)[arm.model][0]
    if arm.model == "mlp":
        model: dict[str, Any] = {"kind": "mlp", "hidden_dim": 512, "dropout": 0.0}
        data: dict[str, Any] = {"kind": "synthetic_classification", "features": 784, "classes": 10}
    else:
        model = {"kind": "gpt", "size": arm.model, "dropout": 0.0, "context": workload.context}
        vocab = gpt_config(arm.model).vocab_size
        data = {"kind": "synthetic_tokens", "vocab_size": vocab, "context": workload.context}
    values = {
        "name": f"predict-{arm.model}",
        "model": model | {"compile": arm.is_compiled},
        "data": data | {"samples": _SAMPLES},
        "parallel": {"device": device, "ranks": arm.ranks, "strategy": arm.strategy},
        "comm": {"backend": "gloo" if arm.backend == "gloo" else "auto"},
        "train": {"steps": 8, "global_batch": workload.batch * arm.ranks, "precision": arm.precision},
        "optim": {"kind": "adamw", "lr": 1e-4},
    }
    return config_from_dict(values, "bench")


def bench_predict(
    arms: list[PredictArm],
    device: str,
    cluster_of: Callable[[PredictArm], Cluster],
    *,
    steps: int,
    tell: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yields a row for each arm: predicted, measured, and by how much the one is off the other."""
    for arm in arms:
        started = time.perf_counter()
        row: dict[str, Any] = {"arm": arm.name, **asdict(arm)}
        try:
            config = config_of(arm, device)
            row |= _predicted(config, cluster_of(arm))
            row |= _measured(config, arm, device, steps)
            row |= _errors(row)
        except Exception as error:  # out of memory, a compiler that fails: the other arms are worth having
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        tell(f"{arm.model} {arm.name}: {_told(row)} ({time.perf_counter() - started:.0f} s)")
        yield row
        clean_up(torch.device(device))


def _predicted(config: Config, cluster: Cluster) -> dict[str, Any]:
    ranks = config.parallel.decided_ranks
    started = time.perf_counter()
    (program,) = record_stages(config, ranks=ranks)
    traced = time.perf_counter() - started
    found = replay(program, cluster)
    rank = found.longest
    return {
        "predicted_ms": found.seconds * 1e3,
        "predicted_work_ms": rank.compute * 1e3,
        "predicted_host_ms": rank.launch_wait * 1e3,
        "predicted_exposed_ms": rank.exposed * 1e3,
        "predicted_hidden_ms": rank.hidden * 1e3,
        "predicted_contention_ms": rank.contention * 1e3,
        "predicted_families_ms": device_families(program, cluster),
        "predicted_peak_bytes": found.total_memory - found.memory["framework"],  # the allocator does not see that
        "trace_s": traced,
    }


def device_families(program: Program, cluster: Cluster) -> dict[str, float]:
    """Milliseconds of the device by family of kernels: where a prediction that is off goes wrong."""
    found: dict[str, float] = {}
    for operation, (_, seconds) in kernel_seconds(program, cluster).items():
        name = "fused" if operation.name == "fused" else operation.family
        found[name] = found.get(name, 0.0) + 1e3 * seconds
    return found


def _measured(config: Config, arm: PredictArm, device: str, steps: int) -> dict[str, Any]:
    if device == "cuda":
        found = [measure_steps(SoloCommunicator(_GPU), config, arm.backend, steps)]
    else:
        found = run_processes(measure_steps, arm.ranks, args=(config, arm.backend, steps), timeout_s=_TIMEOUT_S)
    return max(found, key=lambda each: each["measured_ms"])  # the slowest rank


def measure_steps(comm: Communicator, config: Config, backend: str, steps: int) -> dict[str, Any]:
    """Runs the config's own training step on this rank, on one batch.

    Returns the median time and the distance of the quartiles, and on a GPU the peak of memory.
    """
    device = comm.device
    if backend == "shared_memory":
        comm = SharedMemoryCommunicator.join(comm)
    data = data_of(config)
    torch.manual_seed(config.train.seed)
    with device:  # a GPU draws a billion weights at once
        model = build_model(config.model, data.shape)
    engine = parallelize(model, comm, layout=layout_of(config, comm.size))
    optimizer = build_optimizer(config.optim, engine.named_parameters())
    policy = build_policy(config)
    loss = build_loss(config.train.loss, data.shape, dtype=policy.dtype)
    batch = _batch(config, data.train, comm.size, device)
    step = partial(train_step, engine, optimizer, batch, loss, policy)
    for _ in range(_WARM_UP):
        time_step(step, device)
    comm.barrier()
    gauge = MemoryGauge(device)
    gauge.reset()
    low, middle, high = quartiles([time_step(step, device) for _ in range(steps)])
    peak = gauge.peak_bytes() if device.type == "cuda" else None
    return {
        "measured_ms": middle * 1e3,
        "spread_ms": (high - low) * 1e3,
        "num_steps": steps,
        "measured_peak_bytes": peak,
    }


def _batch(config: Config, dataset: Any, ranks: int, device: torch.device) -> StepBatch:
    """Makes one step of this rank: the same samples in every step."""
    asked = config_batch(config, ranks)
    samples = default_collate([dataset[place % len(dataset)] for place in range(asked.microbatch)])
    placed = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, samples)
    return StepBatch(microbatches=[placed] * asked.accumulate, global_samples=asked.global_batch)


def _errors(row: dict[str, Any]) -> dict[str, Any]:
    found = {"step_error": row["predicted_ms"] / row["measured_ms"] - 1}
    if row["measured_peak_bytes"] and row["predicted_peak_bytes"]:
        found["memory_error"] = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
    return found


def _told(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    memory = f", memory {100 * row['memory_error']:+.1f} %" if "memory_error" in row else ""
    return (
        f"predicted {row['predicted_ms']:.1f} ms, measured {row['measured_ms']:.1f} ms, "
        f"{100 * row['step_error']:+.1f} %{memory}"
    )
