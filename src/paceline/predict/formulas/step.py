"""What a training step of a transformer takes: blocks, pipeline, data-parallel communication, optimizer.

    step = pipeline of blocks + communication that nothing hides + optimizer + the slowest device

Blocks are priced once (predict/formulas/block.py). Under FSDP one microbatch runs on the event core: unshards ahead of
use, reduces behind; all microbatches are alike. Under DDP and ZeRO the gradients of the last microbatch are reduced
block by block behind its backward, on the event core too; what is left over is waited for. Megatron without sharding
reduces them all at once when the backward is done.

A pipeline of stages that take c_i (forward and backward of one microbatch) takes, for m microbatches and v chunks,
(m - 1) max c + sum c / v + (max c)(1 - 1/v).

All ranks wait for the slowest of N: devices of one kind differ, and so do batches.

    loss = sigma x (E[largest of N normal deviates] - E[largest of 8]) x compute

as constants come from runs on one node, and hold what the slowest of its eight takes. GPUs of one model and one cluster
differ by 8 % from the slowest to the fastest that is no outlier (mean over clusters and programs; Sinha and others,
"Not All GPUs Are Created Equal", arXiv 2208.11035): clocks depend on the chip, its voltage and its cooling. Whiskers of
a box plot are 5.4 standard deviations apart, so sigma is 0.015.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from paceline.cluster.devices import Cluster, Device
from paceline.cluster.kernels import memory_seconds
from paceline.cluster.nccl import Collective, Group, collective_seconds, group_of
from paceline.plan.layout import Layout
from paceline.plan.workload import Workload, stage_layers
from paceline.predict.formulas.block import CALL_S, PASSES, BlockCosts, BlockModel
from paceline.predict.formulas.constants import Constants
from paceline.schedule.clock import Timeline

_DEVICE_SPREAD = 0.015
_NODE_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where a step's seconds go, on the rank that is busiest."""

    compute: float
    tensor_wait: float
    launch_wait: float
    bubble: float
    exposed: float
    hidden: float
    contention: float
    slowest: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step; hidden communication costs nothing but its contention."""
        busy = self.compute + self.tensor_wait + self.launch_wait + self.bubble
        return busy + self.exposed + self.contention + self.slowest + self.optimizer


def transformer_step(workload: Workload, cluster: Cluster, constants: Constants) -> StepParts:
    """Returns what a step takes."""
    layout = workload.layout
    costs = BlockModel(workload, cluster, constants).costs()
    layers = stage_layers(workload.shape.layers, layout.pipeline)
    message = _message_seconds(workload, cluster, constants)
    waits = message if _leaves_node(layout, cluster) else 0.0
    stages = [_stage(costs, count, place, layout.pipeline, waits) for place, count in enumerate(layers)]
    busiest = max(range(len(stages)), key=lambda place: (stages[place].both, place))
    microbatches = workload.microbatches
    piped = pipeline_seconds(stages, microbatches, layout.chunks, message - waits)
    exposed, hidden = _DataParallelTime(workload, cluster, constants, costs, layers[busiest]).seconds()
    device, wait = _spent(costs, layers[busiest], busiest, layout.pipeline)
    alone = microbatches * stages[busiest].both
    return StepParts(
        compute=microbatches * device,
        tensor_wait=microbatches * wait,
        launch_wait=max(0.0, alone - microbatches * (device + wait)),
        bubble=max(0.0, piped - alone),
        exposed=exposed,
        hidden=hidden,
        contention=constants.contention * hidden,
        slowest=slowest_share(layout.ranks) * microbatches * device,
        optimizer=_optimizer_seconds(workload, cluster, constants, layers[busiest]),
    )


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One microbatch on one rank of a pipeline: over all its chunks."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def pipeline_seconds(stages: Sequence[StageSeconds], microbatches: int, chunks: int = 1, message: float = 0.0) -> float:
    """Returns how long 1F1B (interleaved where chunks > 1) takes, by the closed form.

    ``message`` is what a rank waits for a neighbour's tensor; it is paid on the way in and out, once for each chunk.
    """
    slowest = max(stage.both for stage in stages)
    fill = (sum(stage.both for stage in stages) - slowest) / chunks
    return microbatches * slowest + fill + 2 * (len(stages) - 1) * message


def slowest_share(devices: int) -> float:
    """Returns what waiting for the slowest of so many devices takes more than on one node, as a share of compute."""
    return _DEVICE_SPREAD * max(0.0, expected_most(devices) - expected_most(_NODE_DEVICES))


def slowest_device(device: Device, count: int) -> Device:
    """Returns the one of so many that the others wait for; ranks on processors are measured on their own host."""
    share = 0.0 if device.is_cpu else slowest_share(count)
    return replace(device, factor=device.factor * (1 + share)) if share else device


@cache
def expected_most(count: int) -> float:
    """Returns the expected largest of so many normal deviates, by Blom's formula: 1.4 of 8, 3.2 of 1,024."""
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _stage(costs: BlockCosts, layers: int, place: int, stages: int, waits: float) -> StageSeconds:
    forward, backward = costs.forward.times(layers), costs.backward.times(layers)
    if place == 0:
        forward, backward = forward + costs.embed, backward + costs.embed
    if place == stages - 1:
        forward, backward = forward + costs.head_forward, backward + costs.head_backward
    return StageSeconds(forward.seconds + waits, backward.seconds + waits)


def _spent(costs: BlockCosts, layers: int, place: int, stages: int) -> tuple[float, float]:
    both = (costs.forward + costs.backward).times(layers)
    if place == 0:
        both = both + costs.embed.times(2)
    if place == stages - 1:
        both = both + costs.head_forward + costs.head_backward
    return both.device, both.wait


def _message_seconds(workload: Workload, cluster: Cluster, constants: Constants) -> float:
    """Of one tensor between neighbours. Inside a node it hides behind compute but while the pipeline fills and drains;
    across nodes, a rank waits for each."""
    layout = workload.layout
    if layout.pipeline == 1:
        return 0.0
    # Tensor ranks send a part each, and gather behind the link.
    num_bytes = workload.tokens * workload.shape.width * 2 / layout.tensor
    group = Group(2, 2 if _leaves_node(layout, cluster) else 1)
    return (collective_seconds("send", num_bytes, group, cluster) + CALL_S) * constants.slowdown


def _leaves_node(layout: Layout, cluster: Cluster) -> bool:
    """Whether neighbours in the pipeline are on different nodes."""
    return layout.tensor * layout.context * layout.data >= cluster.node.devices


class _DataParallelTime:
    """The communication of data-parallel ranks, and what of it is left over."""

    def __init__(
        self, workload: Workload, cluster: Cluster, constants: Constants, costs: BlockCosts, layers: int
    ) -> None:
        self.workload, self.cluster, self.constants, self.costs = workload, cluster, constants, costs
        self.layers = layers
        model, layout = workload.shape, workload.layout
        self.ranks = layout.data * layout.context
        self.block_params = model.attention_params / layout.tensor + model.mlp_params / layout.tensor / layout.expert
        self.end_params = model.end_params / layout.tensor

    def seconds(self) -> tuple[float, float]:
        """Returns exposed and hidden seconds of a step."""
        if self.ranks == 1:
            return 0.0, 0.0
        return self._sharded() if self.workload.layout.is_fully_sharded else self._reduced()

    def _group(self, ranks: int) -> Group:
        """Returns so many data-parallel ranks, neighbours on that axis."""
        return group_of(self.cluster, ranks, self.workload.layout.tensor)

    def _collective(self, kind: Collective, num_bytes: float, ranks: int) -> float:
        alone = collective_seconds(kind, num_bytes, self._group(ranks), self.cluster)
        return (alone + CALL_S) * self.constants.slowdown if alone else 0.0

    def _sharded(self) -> tuple[float, float]:
        run, shards = self.workload.run, self.workload.layout.shards
        gather_bytes = 1 if run.fp8_gather else 4 if run.is_wide else 2
        reduce_bytes = 2 if run.pure or run.framework == "megatron" else 4
        gather = self._collective("all_gather", self.block_params * gather_bytes, shards)
        reduce = self._collective("reduce_scatter", self.block_params * reduce_bytes, shards)
        ends = self._collective("all_gather", self.end_params * gather_bytes, shards)
        ends_reduce = self._collective("reduce_scatter", self.end_params * reduce_bytes, shards)
        timeline = Timeline()
        self._forward(timeline, gather, ends)
        self._backward(timeline, gather, reduce, ends_reduce)
        # In a pipeline, parameters stay gathered for the step, and gradients are reduced once.
        times = 1 if self.workload.layout.pipeline > 1 else self.workload.microbatches
        exposed = timeline.idle("compute") * times
        return exposed, max(0.0, timeline.busy("link") * times - exposed)

    def _forward(self, timeline: Timeline, gather: float, ends: float) -> None:
        seconds = self.costs.forward.seconds
        computed = [timeline.add("compute", self.costs.embed.seconds, after=(timeline.add("link", ends),))]
        ahead = timeline.add("link", gather)
        for _ in range(self.layers):
            here = ahead
            # One block is gathered ahead: its buffer is free when the block before the last one is done.
            ahead = timeline.add("link", gather, after=(computed[-1],))
            computed.append(timeline.add("compute", seconds, after=(here,)))
        timeline.add("compute", self.costs.head_forward.seconds + self.costs.head_backward.seconds)

    def _backward(self, timeline: Timeline, gather: float, reduce: float, ends: float) -> None:
        seconds = self.costs.backward.seconds
        last = timeline.spans[-1]
        ahead = timeline.add("link", gather)
        for _ in range(self.layers):
            here = ahead
            ahead = timeline.add("link", gather, after=(last,))
            last = timeline.add("compute", seconds, after=(here,))
            timeline.add("link", reduce, after=(last,))
        last = timeline.add("compute", self.costs.embed.seconds)
        timeline.add("link", ends, after=(last,))

    def _reduced(self) -> tuple[float, float]:
        layout, run = self.workload.layout, self.workload.run
        # Megatron sums bf16 gradients in fp32 (accumulate_allreduce_grads_in_fp32, which bf16 turns on), others as they
        # are.
        width = 4 if run.is_wide or (run.framework == "megatron" and run.compute == "bf16") else 2
        sharded = layout.strategy in ("zero1", "zero2")
        across = self.ranks // layout.shards if sharded else 1
        if not layout.overlap and run.framework == "megatron":
            return self._reduced_at_once(width), 0.0
        kind: Collective = "reduce_scatter" if sharded and across == 1 else "all_reduce"
        each = self._collective(kind, self.block_params * width, self.ranks)
        ends = each * self.end_params / self.block_params
        exposed, hidden = reduce_behind(self.layers, self.costs.backward.seconds, each, ends)
        if sharded:
            gathered, beside = self._gathered(layout.shards)
            exposed, hidden = exposed + gathered, hidden + beside
        return exposed, hidden

    def _reduced_at_once(self, width: int) -> float:
        """Seconds of one all-reduce after the backward. Inside a node, nothing is in its way."""
        whole = (self.layers * self.block_params + self.end_params) * width
        seconds = self._collective("all_reduce", whole, self.ranks)
        return seconds / self.constants.slowdown if self._group(self.ranks).nodes == 1 else seconds

    def _gathered(self, shards: int) -> tuple[float, float]:
        """Exposed and hidden seconds of the updated parameters' way back, after the optimizer.

        Megatron gathers block by block, ahead of the next step's first forward; the others all at once.
        """
        if self.workload.run.framework != "megatron":
            total = self.layers * self.block_params + self.end_params
            return self._collective("all_gather", total * 2, shards), 0.0
        timeline = Timeline()
        each = self._collective("all_gather", self.block_params * 2, shards)
        ends = each * self.end_params / self.block_params / 2
        timeline.add("compute", self.costs.embed.seconds, after=(timeline.add("link", ends),))
        for _ in range(self.layers):
            timeline.add("compute", self.costs.forward.seconds, after=(timeline.add("link", each),))
        timeline.add("compute", self.costs.head_forward.seconds, after=(timeline.add("link", ends),))
        exposed = timeline.idle("compute")
        return exposed, timeline.busy("link") - exposed


def reduce_behind(pieces: int, backward: float, reduce: float, ends: float = 0.0) -> tuple[float, float]:
    """Returns exposed and hidden seconds of reductions: one behind each piece of a backward, and one of the ends."""
    timeline = Timeline()
    for _ in range(pieces):
        last = timeline.add("compute", backward)
        timeline.add("link", reduce, after=(last,))
    timeline.add("link", ends, after=(last,))
    exposed = timeline.idle("compute")
    return exposed, timeline.busy("link") - exposed


def _optimizer_seconds(workload: Workload, cluster: Cluster, constants: Constants, layers: int) -> float:
    model, layout = workload.shape, workload.layout
    dense = layers * model.attention_params + model.end_params / min(layout.pipeline, 2)
    # The same experts are on fewer ranks, which cut their states.
    experts = layers * model.mlp_params / max(layout.expert, layout.shards)
    params = (dense / layout.shards + experts) / layout.tensor
    moved = params * PASSES[workload.run.framework].optimizer_bytes
    return memory_seconds(cluster.device, constants, moved)
