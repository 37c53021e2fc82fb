"""The ways to train a transformer on a number of devices: meshes, strategies, microbatches, schedules, recomputation.

    devices = pipeline x data x tensor        data = replicate x shard
    tensor      inside a node, a divisor of the heads and of the heads of keys and values
    pipeline    at most as many stages as blocks, and as many microbatches as stages at least
    strategy    ddp, zero1, zero2, fsdp; hybrid: fsdp among the data ranks of one node, replicas of it on the others
    microbatch  powers of two that divide a data rank's samples
    schedule    1f1b; interleaved with 2 to 4 chunks a rank, where they divide the blocks and stages the microbatches

What cannot be is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.cluster.devices import Cluster
from paceline.planner.workload import Compute, Framework, Layout, ModelShape, Recompute, Running, Sharding, Workload

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
CHECKPOINTS: dict[str, str] = {"none": "none", "selective": "matmuls", "attention": "matmuls", "full": "full"}
_MOST_CHUNKS = 4
_LARGEST_MICROBATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be trained: a model, its batch in sequences, their length, and how a rank computes."""

    model: ModelShape
    global_batch: int
    seq_len: int
    compute: Compute = "bf16"
    framework: Framework = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train. ``shard``: data ranks that share a copy of the states; 1 under ddp."""

    workload: Workload
    strategy: str
    shard: int

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
    def schedule(self) -> str:
        return "" if self.layout.pipeline == 1 else "1f1b" if self.layout.chunks == 1 else "interleaved"

    @property
    def knobs(self) -> dict[str, int | str]:
        """What was decided, one entry a decision, by the main key of each."""
        layout = self.layout
        return {
            "parallel.strategy": f"{self.strategy} {self.shard}" if self.strategy == "hybrid" else self.strategy,
            "parallel.pipeline": layout.pipeline,
            "parallel.chunks": layout.chunks,
            "parallel.tensor": layout.tensor,
            "train.microbatch": self.microbatch,
            "memory.checkpoint_activations": CHECKPOINTS[self.recompute],
        }

    @property
    def settings(self) -> dict[str, int | str | bool]:
        """The keys of a config that say it, without those that have no effect, and without the batch."""
        layout = self.layout
        found: dict[str, int | str | bool] = {"parallel.strategy": self.strategy}
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
        found["memory.checkpoint_activations"] = CHECKPOINTS[self.recompute]
        found["train.microbatch"] = self.microbatch
        return found

    def __str__(self) -> str:
        layout = self.layout
        parts = [f"{self.strategy} over {layout.data}"]
        if self.strategy == "hybrid":
            parts = [f"hybrid, {self.shard} ranks a copy, over {layout.data}"]
        parts += [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
        if layout.pipeline > 1:
            parts.append(f"pipeline {layout.pipeline}" + (f" x {layout.chunks} chunks" if layout.chunks > 1 else ""))
        parts.append(f"microbatch {self.microbatch} x {self.accumulate}")
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join(parts)


def recomputing(candidate: Candidate, recompute: Recompute) -> Candidate:
    """Returns the candidate with so much computed again."""
    workload = candidate.workload
    return replace(candidate, workload=replace(workload, run=replace(workload.run, recompute=recompute)))


def candidates_for(task: Task, cluster: Cluster, left_out: Counter[str]) -> Iterator[Candidate]:
    """Iterates over all that can be, with nothing recomputed; counts in ``left_out`` what cannot, by reason."""
    for tensor in divisors(cluster.node.devices):
        if task.model.heads % tensor or task.model.kv_heads % tensor:
            left_out["tensor ranks do not divide the heads"] += 1
            continue
        for pipeline in divisors(cluster.devices // tensor):
            if pipeline > task.model.layers:
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
    for microbatch in _powers_of_two(local):
        count = local // microbatch
        if count < pipeline:
            left_out["fewer microbatches than stages"] += 1
            continue
        for chunks in _chunks(task.model.layers, pipeline, count):
            for strategy, sharding, shard in _strategies(data, max(1, cluster.node.devices // tensor)):
                layout = Layout(
                    devices=cluster.devices,
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    chunks=chunks,
                    sharding=sharding,
                    shard_group=shard if strategy == "hybrid" else 0,
                    sequence_parallel=tensor > 1 and task.seq_len % tensor == 0,
                )
                yield Candidate(workload=workload_of(task, layout, microbatch), strategy=strategy, shard=shard)


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


def _chunks(layers: int, pipeline: int, microbatches: int) -> Iterator[int]:
    yield 1
    if pipeline > 1 and microbatches % pipeline == 0:
        yield from (count for count in range(2, _MOST_CHUNKS + 1) if layers % (pipeline * count) == 0)


def _strategies(data: int, local: int) -> Iterator[tuple[str, Sharding, int]]:
    """Strategy, what it shares in the terms of the prediction, and among how many. ``local``: data ranks of a node."""
    yield "ddp", "ddp", 1
    if data > 1:
        yield "zero1", "zero1", data
        yield "zero2", "zero2", data
        yield "fsdp", "fsdp", data
    if 1 < local < data and data % local == 0:
        yield "hybrid", "fsdp", local


def _powers_of_two(number: int) -> Iterator[int]:
    size = 1
    while size <= min(number, _LARGEST_MICROBATCH) and number % size == 0:
        yield size
        size *= 2


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, the smallest first."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
