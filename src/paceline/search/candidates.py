"""The ways to train a model on a number of devices: meshes, strategies, microbatches, schedules, recomputation.

    devices = pipeline x data x context x tensor        data x context = replicate x shard
    tensor      inside a node, a divisor of the heads and of the heads of keys and values
    pipeline    at most as many stages as blocks, and as many microbatches as stages at least
    strategy    ddp, zero1, zero2, fsdp; hybrid: fsdp among the data ranks of one node, replicas of it on the others
    context     of long sequences: a power of two, at most 64, as long as a rank has 8,192 tokens of each
    microbatch  powers of two that divide a data rank's samples
    schedule    1f1b; interleaved with 2 to 4 chunks a rank, where they divide the blocks and stages the microbatches;
                zb-h1, and zb-v with twice as many microbatches as stages, where nothing is fully sharded or compiled

Buckets, offload and what stays gathered are tried in ``search.py``. What cannot be is counted by reason.
``automatic.py`` has candidates of its own, in the order of what they cost; both are judged as a ``Candidate``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.cluster.devices import Cluster
from paceline.errors import UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Layout, Strategy
from paceline.plan.model_shape import ModelShape
from paceline.plan.plan import MemoryEstimate
from paceline.plan.workload import Compute, Framework, Running, Workload, layout_label
from paceline.predict.formulas.step import Prediction
from paceline.predict.memory.memory import EngineMemory

CHECKPOINTS: tuple[str, ...] = ("none", "matmuls", "full")
_MOST_CHUNKS = 4
_MOST_CONTEXT, _CONTEXT_TOKENS = 64, 8192
_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """What is to be trained: a model, its batch in samples, their tokens, and how a rank computes.

    ``base`` has what is the same in all layouts. ``names_precision``: the precision is searched for. ``need``: bytes of
    a rank by the estimate that the engines are checked against; None where that does not know the model.
    """

    model: ModelShape
    global_batch: int
    seq_len: int
    compute: Compute = "bf16"
    framework: Framework = "eager"
    base: Layout = field(default_factory=Layout)
    names_precision: bool = False
    checkpoints: tuple[str, ...] = CHECKPOINTS
    need: EngineMemory | None = None

    def workload(self, layout: Layout) -> Workload:
        run = Running(
            seq_len=self.seq_len,
            compute=self.compute,
            framework=self.framework,
            autocast=True,
            names_precision=self.names_precision,
        )
        return Workload(model=self.model, layout=layout, run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout, what a rank needs for it, and why it is not taken; empty where it was, or was not looked at.

    ``prediction``: of a step, where somebody asked for the time. ``overhead``: of a split model in the ladder of
    ``auto``, the time beside computing, in parts of it, by a rule of thumb.
    """

    layout: Layout
    memory: MemoryEstimate
    overhead: float = 0.0
    rejected: str = ""
    prediction: Prediction | None = None

    @property
    def label(self) -> str:
        return layout_label(self.layout)

    @property
    def memory_bytes(self) -> float:
        """Of the device of a rank."""
        return float(self.memory.device_bytes)

    @property
    def seconds(self) -> float | None:
        return None if self.prediction is None else self.prediction.seconds

    def to_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            **{name: getattr(layout, name) for name in ("strategy", "microbatch", "pipeline", "tensor", "data")},
            **{name: getattr(self, name) for name in ("overhead", "rejected", "seconds", "label")},
            "group": layout.shards,
            "checkpoint": layout.checkpoint_activations,
            "offload": layout.offload.parts,
            "memory": self.memory.to_json(),
        }


def resized(cluster: Cluster, devices: int) -> Cluster:
    """Returns the cluster with another number of devices: a part of one node, or whole nodes."""
    each = cluster.node.devices
    if 1 <= devices <= each:
        return replace(
            cluster, name=f"{devices} of {cluster.node.name}", nodes=1, node=replace(cluster.node, devices=devices)
        )
    if devices < 1 or devices % each:
        near = [max(1, devices // each) * each, -(-max(devices, 1) // each) * each]
        raise UsageError(
            f"{devices} devices of {cluster.node.name}, which has {each}\n"
            "  beyond one node they are whole nodes, so that a mesh fits them\n"
            f"  try {' or '.join(str(count) for count in sorted(set(near)))}"
        )
    return replace(cluster, name=f"{devices // each}x {cluster.node.name}", nodes=devices // each)


def candidates_for(task: TrainingTask, cluster: Cluster, left_out: Counter[str]) -> Iterator[Layout]:
    """Iterates over all that can be, with nothing recomputed; counts in ``left_out`` what cannot, by reason."""
    model = task.model
    if model.is_sampled:
        if task.global_batch % cluster.devices:
            left_out["data ranks do not divide the batch"] += 1
        else:
            yield from _of_mesh(task, cluster, (1, cluster.devices, 1, 1), left_out)
        return
    for tensor in divisors(cluster.node.devices):
        if model.heads % tensor or model.kv_heads % tensor:
            left_out["tensor ranks do not divide the heads"] += 1
            continue
        for pipeline in divisors(cluster.devices // tensor):
            if pipeline > model.layers:
                left_out["more stages than blocks"] += 1
                continue
            for context in context_degrees(task, cluster.devices // (tensor * pipeline)):
                data = cluster.devices // (tensor * pipeline * context)
                if task.global_batch % data:
                    left_out["data ranks do not divide the batch"] += 1
                    continue
                yield from _of_mesh(task, cluster, (pipeline, data, context, tensor), left_out)


def context_degrees(task: TrainingTask, ranks: int) -> list[int]:
    """Returns among how many of so many ranks a sequence may be shared."""
    most = 1 if task.model.experts or task.model.is_sampled else min(_MOST_CONTEXT, task.seq_len // _CONTEXT_TOKENS)
    return [degree for degree in divisors(ranks) if degree == 1 or (degree <= most and not degree & (degree - 1))]


def _of_mesh(
    task: TrainingTask, cluster: Cluster, mesh: tuple[int, int, int, int], left_out: Counter[str]
) -> Iterator[Layout]:
    pipeline, data, context, tensor = mesh
    local = task.global_batch // data
    layers = 1 if task.model.is_sampled else task.model.layers
    of_node = max(1, cluster.node.devices // tensor)
    experts = [1]  # ranks among which the experts of a block are shared: data ranks of one node
    if task.model.experts:
        some = divisors(task.model.experts)[1:]
        experts += [each for each in some if each <= min(of_node, data) and data % each == 0]
    base = replace(task.base, data=data, pipeline=pipeline, tensor=tensor, node_ranks=cluster.node.devices)
    is_cut = tensor > 1 and task.seq_len % (tensor * (2 * context if context > 1 else 1)) == 0
    base = replace(base, context_ranks=context, sequence_parallel=is_cut)
    for microbatch in (size for size in _MICROBATCHES if local % size == 0):
        count = local // microbatch
        if count < pipeline:
            left_out["fewer microbatches than stages"] += 1
            continue
        for schedule, chunks in _schedules(task, layers, pipeline, count, left_out):
            for strategy, shards in strategies_for(data * context, of_node, is_split=pipeline * tensor > 1):
                if strategy == "hybrid" and shards % context:
                    continue  # ranks that share a sequence would hold different slices in part
                layout = replace(base, strategy=strategy, shard_ranks=shards, schedule=schedule, chunks=chunks)
                layout = replace(layout, microbatch=microbatch, accumulate=count)
                if layout.splits_backward and layout.is_fully_sharded:
                    continue  # weights are gone when the second part of backward comes
                yield from (replace(layout, expert=each) for each in experts if shards == 1 or shards % each == 0)


def _schedules(
    task: TrainingTask, layers: int, pipeline: int, microbatches: int, left_out: Counter[str]
) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    if pipeline == 1:
        return
    if microbatches % pipeline == 0:
        yield from (("interleaved", count) for count in range(2, _MOST_CHUNKS + 1) if layers % (pipeline * count) == 0)
    if task.framework == "compiled":
        left_out["zero-bubble schedules cut the backward of compiled blocks"] += 1
        return
    yield "zb-h1", 1
    if microbatches >= 2 * pipeline and layers % (2 * pipeline) == 0:
        yield "zb-v", 2


def strategies_for(data: int, local: int, *, is_split: bool) -> Iterator[tuple[Strategy, int]]:
    """Strategies, the cheapest first, and how many ranks share the states in each. ``local``: data ranks of a node."""
    yield "ddp", 1
    if data > 1 or not is_split:  # one rank's for what they may offload
        yield "zero1", data
        if data > 1:
            yield "zero2", data
        if 1 < local < data and data % local == 0:
            yield "hybrid", local
        yield "fsdp", data
