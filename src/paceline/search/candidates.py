"""The ways to train a model on a number of devices: meshes, strategies, microbatches, schedules, recomputation.

    devices = pipeline x data x tensor        data = replicate x shard
    tensor      inside a node, a divisor of the heads and of the heads of keys and values
    pipeline    at most as many stages as blocks, and as many microbatches as stages at least
    strategy    ddp, zero1, zero2, fsdp; hybrid: fsdp among the data ranks of one node, replicas of it on the others
    microbatch  powers of two that divide a data rank's samples
    schedule    1f1b; interleaved with 2 to 4 chunks a rank, where they divide the blocks and stages the microbatches;
                zb-h1, and zb-v with twice as many microbatches as stages, where nothing is fully sharded or compiled

A model that is known by what a sample of it costs is not split: its meshes are data alone. What is tuned besides, for
those of them that are worth it, is in ``tuning.py``. What cannot be is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from paceline.cluster.devices import Cluster
from paceline.plan.workload import (
    Compute,
    Framework,
    Layout,
    ModelShape,
    Recompute,
    Running,
    SampleModel,
    Sharding,
    Workload,
)

ZeroBubble: TypeAlias = Literal["", "zb-h1", "zb-v"]
Value: TypeAlias = int | float | str | bool | list[str]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
CHECKPOINTS: dict[str, str] = {"none": "none", "selective": "matmuls", "attention": "matmuls", "full": "full"}
_MOST_CHUNKS = 4
_LARGEST_MICROBATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be trained: a model, its batch in samples, their tokens, and how a rank computes.

    ``precision`` is the config's name for it where it was searched for. ``recompute``: what may be computed again.
    """

    model: ModelShape | SampleModel
    global_batch: int
    seq_len: int
    compute: Compute = "bf16"
    framework: Framework = "eager"
    precision: str = ""
    recompute: tuple[Recompute, ...] = RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What changes no mesh: ``bucket_mb`` of gradients (None: the default), what stays gathered, what is offloaded."""

    bucket_mb: float | None = None
    reshard: bool = True
    offload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train. ``shard``: data ranks that share a copy of the states; 1 under ddp."""

    workload: Workload
    strategy: str
    shard: int
    zero_bubble: ZeroBubble = ""
    tuning: Tuning = field(default_factory=Tuning)
    precision: str = ""

    @property
    def layout(self) -> Layout:
        return self.workload.layout

    @property
    def microbatch(self) -> int:
        return int(self.workload.run.micro_batch)

    @property
    def accumulate(self) -> int:
        return self.workload.microbatches

    @property
    def recompute(self) -> Recompute:
        return self.workload.run.recompute

    @property
    def offload(self) -> tuple[str, ...]:
        return self.tuning.offload

    @property
    def schedule(self) -> str:
        if self.layout.pipeline == 1:
            return ""
        return self.zero_bubble or ("1f1b" if self.layout.chunks == 1 else "interleaved")

    @property
    def knobs(self) -> dict[str, int | str]:
        """What was decided, one entry a decision, by the main key of each."""
        layout, tuning = self.layout, self.tuning
        return {
            "parallel.strategy": f"{self.strategy} {self.shard}" if self.strategy == "hybrid" else self.strategy,
            "parallel.pipeline": layout.pipeline,
            "parallel.schedule": f"{self.schedule} {layout.chunks}",
            "parallel.tensor": layout.tensor,
            "train.microbatch": self.microbatch,
            "train.precision": self.precision,
            "memory.checkpoint_activations": CHECKPOINTS[self.recompute],
            "memory.offload": " ".join(tuning.offload),
            "comm.bucket_mb": str(tuning.bucket_mb),
            "parallel.reshard_after_forward": str(tuning.reshard),
        }

    @property
    def settings(self) -> dict[str, Value]:
        """The keys of a config that say it, without those that have no effect, and without the batch."""
        layout, tuning = self.layout, self.tuning
        found: dict[str, Value] = {"parallel.strategy": self.strategy}
        if self.strategy == "hybrid":
            found["parallel.shard_ranks"] = self.shard
        found["parallel.pipeline"] = layout.pipeline
        if layout.pipeline > 1:
            found["parallel.schedule"] = self.schedule
        if layout.chunks > 1:
            found["parallel.chunks"] = layout.chunks
        found["parallel.tensor"] = layout.tensor
        if layout.tensor > 1:
            found["parallel.sequence_parallel"] = layout.sequence_parallel
        if not tuning.reshard:
            found["parallel.reshard_after_forward"] = False
        found["memory.checkpoint_activations"] = CHECKPOINTS[self.recompute]
        if tuning.offload:
            found["memory.offload"] = list(tuning.offload)
        if tuning.bucket_mb is not None:
            found["comm.bucket_mb"] = tuning.bucket_mb
        if self.precision:
            found["train.precision"] = self.precision
        found["train.microbatch"] = self.microbatch
        return found

    def __str__(self) -> str:
        layout, tuning = self.layout, self.tuning
        parts = [f"{self.strategy} over {layout.data}"]
        if self.strategy == "hybrid":
            parts = [f"hybrid, {self.shard} ranks a copy, over {layout.data}"]
        parts += [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
        parts += [f"expert {layout.expert}"] if layout.expert > 1 else []
        if layout.pipeline > 1:
            parts.append(f"pipeline {layout.pipeline}" + (f" x {layout.chunks} chunks" if layout.chunks > 1 else ""))
        parts += [self.zero_bubble] if self.zero_bubble else []
        parts.append(f"microbatch {self.microbatch} x {self.accumulate}")
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        parts += [f"offload {' and '.join(tuning.offload)}"] if tuning.offload else []
        parts += [f"buckets of {tuning.bucket_mb:g} MiB"] if tuning.bucket_mb is not None else []
        parts += [] if tuning.reshard else ["gathered once a microbatch"]
        parts += [self.precision] if self.precision else []
        return ", ".join(parts)


def recomputing(candidate: Candidate, recompute: Recompute) -> Candidate:
    """Returns the candidate with so much computed again."""
    workload = candidate.workload
    return replace(candidate, workload=replace(workload, run=replace(workload.run, recompute=recompute)))


def tuned(candidate: Candidate, **changes: object) -> Candidate:
    """Returns the candidate with some fields of its tuning changed."""
    return replace(candidate, tuning=replace(candidate.tuning, **changes))  # type: ignore[arg-type]


def candidates_for(task: Task, cluster: Cluster, left_out: Counter[str]) -> Iterator[Candidate]:
    """Iterates over all that can be, with nothing recomputed; counts in ``left_out`` what cannot, by reason."""
    model = task.model
    if isinstance(model, SampleModel):
        if task.global_batch % cluster.devices:
            left_out["data ranks do not divide the batch"] += 1
        else:
            yield from _of_mesh(task, cluster, (1, cluster.devices, 1), left_out)
        return
    for tensor in divisors(cluster.node.devices):
        if model.heads % tensor or model.kv_heads % tensor:
            left_out["tensor ranks do not divide the heads"] += 1
            continue
        for pipeline in divisors(cluster.devices // tensor):
            if pipeline > model.layers:
                left_out["more stages than blocks"] += 1
                continue
            data = cluster.devices // (tensor * pipeline)
            if task.global_batch % data:
                left_out["data ranks do not divide the batch"] += 1
                continue
            yield from _of_mesh(task, cluster, (pipeline, data, tensor), left_out)


def _of_mesh(task: Task, cluster: Cluster, mesh: tuple[int, int, int], left_out: Counter[str]) -> Iterator[Candidate]:
    pipeline, data, tensor = mesh
    local = task.global_batch // data
    layers = task.model.layers if isinstance(task.model, ModelShape) else 1
    of_node = max(1, cluster.node.devices // tensor)
    for microbatch in _powers_of_two(local):
        count = local // microbatch
        if count < pipeline:
            left_out["fewer microbatches than stages"] += 1
            continue
        for chunks, zero_bubble in _schedules(task, layers, pipeline, count, left_out):
            for strategy, sharding, shard in _strategies(data, of_node, is_split=pipeline * tensor > 1):
                if zero_bubble and sharding == "fsdp":
                    continue  # weights are gone when the second part of backward comes
                for expert in _expert_degrees(task.model, data, of_node):
                    layout = Layout(
                        devices=cluster.devices,
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        chunks=chunks,
                        expert=expert,
                        sharding=sharding,
                        shard_group=shard if strategy == "hybrid" else 0,
                        sequence_parallel=tensor > 1 and task.seq_len % tensor == 0,
                    )
                    yield Candidate(
                        workload=workload_of(task, layout, microbatch),
                        strategy=strategy,
                        shard=shard,
                        zero_bubble=zero_bubble,
                        precision=task.precision,
                    )


def workload_of(task: Task, layout: Layout, microbatch: int, recompute: Recompute = "none") -> Workload:
    """Returns a step of the task in this layout."""
    run = Running(
        global_batch=task.global_batch,
        micro_batch=microbatch,
        seq_len=task.seq_len,
        compute=task.compute,
        recompute=recompute,
        framework=task.framework,
        autocast=True,
    )
    return Workload(model=task.model, layout=layout, run=run)


def _schedules(
    task: Task, layers: int, pipeline: int, microbatches: int, left_out: Counter[str]
) -> Iterator[tuple[int, ZeroBubble]]:
    """Chunks of a rank, and the zero-bubble schedule, where it is one."""
    yield 1, ""
    if pipeline == 1:
        return
    if microbatches % pipeline == 0:
        yield from ((count, "") for count in range(2, _MOST_CHUNKS + 1) if layers % (pipeline * count) == 0)
    if task.framework == "compiled":
        left_out["zero-bubble schedules cut the backward of compiled blocks"] += 1
        return
    yield 1, "zb-h1"
    if microbatches >= 2 * pipeline and layers % (2 * pipeline) == 0:
        yield 2, "zb-v"


def _strategies(data: int, local: int, *, is_split: bool) -> Iterator[tuple[str, Sharding, int]]:
    """Strategy, what it shares in the terms of the prediction, and among how many. ``local``: data ranks of a node."""
    yield "ddp", "ddp", 1
    if data == 1 and not is_split:  # for what they may offload
        yield "zero1", "zero1", 1
        yield "fsdp", "fsdp", 1
    if data > 1:
        yield "zero1", "zero1", data
        yield "zero2", "zero2", data
        yield "fsdp", "fsdp", data
    if 1 < local < data and data % local == 0:
        yield "hybrid", "fsdp", local


def _expert_degrees(model: ModelShape | SampleModel, data: int, local: int) -> Iterator[int]:
    """Ranks among which the experts of a block are shared: data ranks of one node. 1 for a dense model."""
    yield 1
    if isinstance(model, ModelShape) and model.experts:
        most = min(local, data)
        yield from (each for each in divisors(model.experts)[1:] if each <= most and data % each == 0)


def _powers_of_two(number: int) -> Iterator[int]:
    size = 1
    while size <= min(number, _LARGEST_MICROBATCH) and number % size == 0:
        yield size
        size *= 2


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, the smallest first."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
