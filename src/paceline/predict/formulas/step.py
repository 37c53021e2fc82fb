"""What a training step takes: the time of a workload on a cluster, put together from its parts, and a prediction of it.

    step = pipeline of blocks + communication that nothing hides + optimizer + the slowest device

Of a transformer, blocks are priced once (predict/formulas/block.py). Under FSDP one microbatch runs on the event core:
unshards ahead of use, reduces behind. Under DDP and ZeRO the gradients of the last microbatch are reduced block by
block behind its backward, on the event core too. Megatron without sharding reduces them all at once afterwards.

A pipeline of stages that take c_i (forward and backward of one microbatch) takes, for k microbatches and v chunks,
(k - 1) max c + sum c / v + (max c)(1 - 1/v).

All ranks wait for the slowest of N, where constants hold what the slowest of one node's eight takes:

    loss = sigma x (E[largest of N normal deviates] - E[largest of 8]) x compute

GPUs of one model and one cluster differ by 8 % from the slowest to the fastest that is no outlier (Sinha and others,
"Not All GPUs Are Created Equal", arXiv 2208.11035). Whiskers of a box plot are 5.4 standard deviations apart, so sigma
is 0.015.

A model that is known by what a sample costs (convolutional, recurrent, translation) is data-parallel:

    device   3 x FLOPs / (ceiling x share of the kind) + bytes / bandwidth; a microbatch takes max(device, host)
    share    convolutions have rates of their own, on 16-bit tensor units and in tf32; other kinds part of products'
    bytes    passes x activations; a recurrence reads its weights again for each token of a sentence
    spread   sigma E[max of N normal deviates]: batches of sentences differ in length from rank to rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.cluster.devices import Cluster, Device
from paceline.cluster.kernels import ceiling, memory_seconds
from paceline.cluster.wires import Collective, Group, collective_seconds, group_of
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape
from paceline.plan.plan import MemoryEstimate
from paceline.plan.workload import Workload, stage_layers
from paceline.predict.formulas.block import CALL_S, PASSES, BlockCosts, BlockModel
from paceline.predict.formulas.constants import (
    Constants,
    ConstantSets,
    between,
    constants_for,
    fitted_constants,
    outside_of,
)
from paceline.predict.formulas.uneven import expected_most
from paceline.predict.memory.memory import footprint
from paceline.schedule.clock import Timeline

# Errors that nine of ten rows of the split dev stay below, inside the calibrated domain (without the table whose very
# blocks were measured) and outside.
FITTED_P90 = 0.15
COMPOSED_P90 = 0.17
_DEVICE_SPREAD = 0.015
_NODE_DEVICES = 8
_BUCKETS = 8  # of a model known by its samples
_OPTIMIZER_BYTES = 40


class _SampleKind(NamedTuple):
    rate: float  # of the rate of ordinary convolutions, or of matrix products
    passes: float  # over each activation, forward and backward
    spread: float
    convolves: bool = True


# Chosen by hand on the one-GPU rows of the split calib, as are the FLOPs and activations of known_models.yaml.
_KINDS = {
    "convolution": _SampleKind(1.0, 17, 0.0065),
    "planar": _SampleKind(1.0, 17, 0.0065),
    "depthwise": _SampleKind(1.0, 50, 0.0065),
    "recurrent": _SampleKind(1.1, 8, 0.115, convolves=False),
    "attention": _SampleKind(1.15, 28, 0.065, convolves=False),
}
_PLANAR = 1.5  # passes of 16-bit convolutions that do not keep channels last: their tensor units turn them around


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where a step's seconds go, on the rank that is busiest."""

    compute: float
    tensor_wait: float = 0.0
    launch_wait: float
    bubble: float = 0.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step takes and needs. ``outside``: why it lies outside the calibrated domain (calibrated_domain.yaml).

    ``memory`` and ``fits`` are of the formula; a search fills in the device's peak, and a rank's bytes by the estimate.
    """

    workload: Workload
    step: StepParts
    memory: MemoryEstimate
    fits: bool
    outside: tuple[str, ...] = ()
    peak_flops: float = 0.0
    memory_bytes: float = 0.0

    def __str__(self) -> str:
        return str(self.workload)

    @property
    def layout(self) -> Layout:
        return self.workload.layout

    @property
    def prediction(self) -> Prediction:
        """Itself, for scripts: a plan's winner had its prediction under this name."""
        return self

    @property
    def fitted(self) -> bool:
        """Whether it lies inside that domain, with constants fitted for this generation and framework."""
        return not self.outside

    @property
    def seconds(self) -> float:
        return self.step.total

    @property
    def error(self) -> float:
        """The half of the band, as a share of the seconds."""
        return FITTED_P90 if self.fitted else COMPOSED_P90

    @property
    def band(self) -> tuple[float, float]:
        """Seconds between which nine of ten published runs of this kind would be: see docs/prediction.md."""
        return self.seconds * (1 - self.error), self.seconds * (1 + self.error)

    @property
    def samples_per_s(self) -> float:
        return self.workload.micro_batch * self.workload.microbatches * self.workload.layout.data / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all samples; of a model whose samples are no rows of tokens, samples."""
        return self.samples_per_s * self.workload.run.seq_len

    @property
    def unit(self) -> str:
        """What throughput counts: tokens, or samples of a model that has none."""
        return "samples" if self.workload.model.is_sampled else "tokens"

    @property
    def mfu(self) -> float:
        """Model FLOPs, causal attention in half, as a share of the devices' dense peak."""
        return self.samples_per_s * model_flops(self.workload) / self.layout.ranks / self.peak_flops

    @property
    def communication(self) -> float:
        """The share of a step that waits for other ranks: tensor-parallel waits, and what nothing hides."""
        return (self.step.tensor_wait + self.step.exposed + self.step.contention) / self.step.total


def predict(
    workload: Workload, cluster: Cluster, sets: ConstantSets | None = None, *, is_ours: bool = False
) -> Prediction:
    """Predicts a step of a workload on a cluster, as the framework that it names runs it.

    ``is_ours``: run by the engines here, with kernels that were measured on the device; published runs had those of
    their day.
    """
    sets = fitted_constants() if sets is None else sets
    memory = footprint(workload)
    return Prediction(
        workload=workload,
        step=step_parts(workload, cluster, sets, is_ours=is_ours),
        memory=memory,
        fits=memory.device_bytes <= cluster.device.memory_bytes,
        outside=outside_of(workload, cluster, sets),
    )


def step_parts(workload: Workload, cluster: Cluster, sets: ConstantSets, *, is_ours: bool = False) -> StepParts:
    """Prices a step with the constants that sets have for its device and framework."""
    generation, framework = cluster.device.generation, workload.run.framework
    if framework == "compiled" and workload.layout.tensor > 1:
        # Tensor-parallel layers of torch break a compiled block into pieces.
        constants = between(sets, generation, "compiled", "eager")
    else:
        constants, _ = constants_for(sets, generation, framework)
    if workload.model.is_sampled:
        return sample_step(workload, cluster, constants)
    return transformer_step(workload, cluster, constants, is_ours=is_ours)


def model_flops(workload: Workload, *, in_full: bool = False) -> float:
    """Of one sequence (or sample), forward and backward; ``in_full``: the half of attention that is masked counts."""
    model = workload.model
    return 3 * model.flops if model.is_sampled else transformer_flops(model, workload.run.seq_len, in_full=in_full)


def transformer_flops(model: ModelShape, length: int, *, in_full: bool = False) -> float:
    scores = 6 if model.causal and not in_full else 12
    return length * (6 * model.active_matmul_params + scores * model.layers * model.score_width * length)


def transformer_step(workload: Workload, cluster: Cluster, constants: Constants, *, is_ours: bool = False) -> StepParts:
    model, layout, microbatches = workload.model, workload.layout, workload.microbatches
    costs = BlockModel(workload, cluster, constants, is_ours=is_ours).costs()
    layers = stage_layers(model.layers + model.ahead, layout.pipeline)
    leaves_node = layout.tensor * layout.context_ranks * layout.data >= cluster.node.devices
    message = 0.0  # of one tensor between neighbours in the pipeline
    if layout.pipeline > 1:
        # Tensor ranks send a part each, and gather behind the link.
        num_bytes = workload.tokens * model.width * 2 / layout.tensor
        message = in_training("send", num_bytes, Group(2, 2 if leaves_node else 1), cluster, constants)
    # Across nodes a rank waits for each; inside a node it hides behind compute but while the pipeline fills and drains.
    waits = message if leaves_node else 0.0
    stages = [_stage(costs, count, place, layout.pipeline, waits) for place, count in enumerate(layers)]
    busiest = max(range(len(stages)), key=lambda place: (stages[place].both, place))
    piped = pipeline_seconds(stages, microbatches, layout.chunks, message - waits)
    exposed, hidden = _DataParallelTime(workload, cluster, constants, costs, layers[busiest]).seconds()
    spent = (costs.forward + costs.backward).times(layers[busiest])
    if busiest == 0:
        spent = spent + costs.embed.times(2)
    if busiest == layout.pipeline - 1:
        spent = spent + costs.head_forward + costs.head_backward
    alone = microbatches * stages[busiest].both
    # Of the optimizer: the same experts are on fewer ranks, which cut their states.
    dense = layers[busiest] * model.other_params + model.end_params / min(layout.pipeline, 2)
    experts = layers[busiest] * model.routed_params / max(layout.expert, layout.shards)
    params = (dense / layout.shards + experts) / layout.tensor
    return StepParts(
        compute=microbatches * spent.device,
        tensor_wait=microbatches * spent.wait,
        launch_wait=max(0.0, alone - microbatches * (spent.device + spent.wait)),
        bubble=max(0.0, piped - alone),
        exposed=exposed,
        hidden=hidden,
        contention=constants.contention * hidden,
        slowest=slowest_share(layout.ranks) * microbatches * spent.device,
        optimizer=memory_seconds(cluster.device, constants, params * PASSES[workload.run.framework].optimizer_bytes),
    )


def sample_step(workload: Workload, cluster: Cluster, constants: Constants) -> StepParts:
    model, run, ranks = workload.model, workload.run, workload.layout.data
    kind = _KINDS[model.kind]
    share = constants.matmul
    if kind.convolves and run.compute != "fp32":  # which has no tensor units: convolutions run as products do
        share = constants.convolution_wide if run.is_wide else constants.convolution
    rate = ceiling(cluster.device, run.compute) * share * kind.rate
    # Mixed precision keeps losses, norms and copies of sentences in fp32, half of the traffic.
    width = 4.0 if run.is_wide else 2.0 if kind.convolves else 3.0
    passes = kind.passes * (_PLANAR if model.kind == "planar" and not run.is_wide else 1.0)
    moved = passes * workload.micro_batch * model.activations
    if model.kind == "recurrent":
        moved += 3 * model.samples_each * model.flops / 2
    device = 3 * workload.micro_batch * model.flops / rate + memory_seconds(cluster.device, constants, width * moved)
    host = 3 * model.kernels * constants.launch_us * 1e-6
    each = max(device, host)
    exposed = hidden = 0.0
    if ranks > 1:
        reduce = in_training("all_reduce", model.params * 4 / _BUCKETS, group_of(cluster, ranks), cluster, constants)
        exposed, hidden = reduce_behind(_BUCKETS, each * 2 / 3 / _BUCKETS, reduce)
    times = workload.microbatches
    return StepParts(
        compute=times * device,
        launch_wait=times * max(0.0, host - device),
        exposed=exposed,
        hidden=hidden,
        contention=constants.contention * hidden,
        slowest=times**0.5 * each * kind.spread * expected_most(ranks),
        optimizer=memory_seconds(cluster.device, constants, model.params * _OPTIMIZER_BYTES),
    )


class StageSeconds(NamedTuple):
    """One microbatch on one rank of a pipeline: over all its chunks."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def _stage(costs: BlockCosts, layers: int, place: int, stages: int, waits: float) -> StageSeconds:
    forward, backward = costs.forward.times(layers), costs.backward.times(layers)
    if place == 0:
        forward, backward = forward + costs.embed, backward + costs.embed
    if place == stages - 1:
        forward, backward = forward + costs.head_forward, backward + costs.head_backward
    return StageSeconds(forward.seconds + waits, backward.seconds + waits)


def pipeline_seconds(stages: Sequence[StageSeconds], microbatches: int, chunks: int = 1, message: float = 0.0) -> float:
    """Returns what 1F1B (interleaved with chunks) takes, by the closed form; ``message``: of a neighbour's tensor."""
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


def in_training(kind: Collective, num_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Returns what a collective takes in training: it must be called, and others are in its way."""
    alone = collective_seconds(kind, num_bytes, group, cluster)
    return (alone + CALL_S) * constants.slowdown if alone else 0.0


class _DataParallelTime:
    def __init__(
        self, workload: Workload, cluster: Cluster, constants: Constants, costs: BlockCosts, layers: int
    ) -> None:
        self.workload, self.cluster, self.constants, self.costs = workload, cluster, constants, costs
        self.layers = layers
        model, layout = workload.model, workload.layout
        self.ranks = layout.data * layout.context_ranks
        self.block_params = (model.other_params + model.routed_params / layout.expert) / layout.tensor
        self.end_params = model.end_params / layout.tensor
        self.params = layers * self.block_params + self.end_params

    def seconds(self) -> tuple[float, float]:
        if self.ranks == 1:
            return 0.0, 0.0
        return self._sharded() if self.workload.layout.is_fully_sharded else self._reduced()

    def _collective(self, kind: Collective, num_bytes: float, ranks: int) -> float:
        group = group_of(self.cluster, ranks, self.workload.layout.tensor)
        return in_training(kind, num_bytes, group, self.cluster, self.constants)

    def _beside(self, kind: Collective, width: int, ranks: int, computing: float) -> tuple[float, float]:
        """Exposed and hidden seconds of a collective a block, behind what it computes; from its end, ahead of it."""
        layout, model = self.workload.layout, self.workload.model
        own = model.routed_params / layout.expert / layout.tensor if layout.expert > 1 else 0.0
        group = group_of(self.cluster, max(1, ranks // layout.expert), layout.tensor * layout.expert)
        shared = self._collective(kind, (self.block_params - own) * width, ranks)
        each = shared + in_training(kind, own * width, group, self.cluster, self.constants)
        ends = shared * self.end_params / (self.block_params - own)
        # Between two chunks of a microbatch, an interleaved pipeline computes the chunks of its other ranks.
        between = layout.pipeline if layout.chunks > 1 else 1
        return reduce_behind(self.layers, between * computing, each, ends)

    def _sharded(self) -> tuple[float, float]:
        workload = self.workload
        # In a pipeline, parameters stay gathered for the step, and gradients are reduced once.
        alike = 1 if workload.layout.pipeline > 1 else workload.microbatches
        kept = alike - 1 if workload.reduces_once else 0
        each = [(alike - kept, self._sharded_pass(reduces=True)), (kept, self._sharded_pass(reduces=False))]
        return sum(times * exposed for times, (exposed, _) in each), sum(times * hidden for times, (_, hidden) in each)

    def _sharded_pass(self, *, reduces: bool) -> tuple[float, float]:
        """Exposed and hidden seconds of one microbatch."""
        run, costs, shards = self.workload.run, self.costs, self.workload.layout.shards
        gather_bytes = 1 if run.fp8_gather else 4 if run.is_wide else 2
        reduce_bytes = 2 if run.pure or run.framework == "megatron" else 4
        both = self.block_params, self.end_params
        gather, ends = (self._collective("all_gather", each * gather_bytes, shards) for each in both)
        reduce, ends_reduce = (self._reduce_sharded(each * reduce_bytes) if reduces else 0.0 for each in both)
        timeline = Timeline()
        last = timeline.add("compute", costs.embed.seconds, after=(timeline.add("link", ends),))
        head = costs.head_forward.seconds + costs.head_backward.seconds
        for each, end in ((costs.forward, head), (costs.backward, costs.embed.seconds)):
            ahead = timeline.add("link", gather)
            for _ in range(self.layers):
                here = ahead
                # One block is gathered ahead: its buffer is free when the block before the last one is done.
                ahead = timeline.add("link", gather, after=(last,))
                last = timeline.add("compute", each.seconds, after=(here,))
                if each is costs.backward:
                    timeline.add("link", reduce, after=(last,))
            last = timeline.add("compute", end)
        timeline.add("link", ends_reduce, after=(last,))
        exposed = timeline.idle("compute")
        return exposed, max(0.0, timeline.busy("link") - exposed)

    def _reduce_sharded(self, num_bytes: float) -> float:
        """Seconds in which gradients come to slices, which replicas then sum among them."""
        layout = self.workload.layout
        seconds = self._collective("reduce_scatter", num_bytes, layout.shards)
        if (replicas := self.ranks // layout.shards) > 1:
            group = group_of(self.cluster, replicas, layout.tensor * layout.shards)
            kept = num_bytes / layout.shards
            seconds += in_training("all_reduce", kept, group, self.cluster, self.constants)
        return seconds

    def _reduced(self) -> tuple[float, float]:
        layout, run = self.workload.layout, self.workload.run
        # Megatron sums bf16 gradients in fp32 (accumulate_allreduce_grads_in_fp32, which bf16 turns on), others as they
        # are.
        width = 4 if run.is_wide or (run.framework == "megatron" and run.compute == "bf16") else 2
        sharded = layout.strategy in ("zero1", "zero2")
        if not layout.overlap and run.framework == "megatron":
            # One all-reduce after the backward. Inside a node, nothing is in its way.
            seconds = self._collective("all_reduce", self.params * width, self.ranks)
            is_inside = group_of(self.cluster, self.ranks, layout.tensor).nodes == 1
            return seconds / self.constants.slowdown if is_inside else seconds, 0.0
        kind: Collective = "reduce_scatter" if sharded and self.ranks // layout.shards == 1 else "all_reduce"
        exposed, hidden = self._beside(kind, width, self.ranks, self.costs.backward.seconds)
        if not sharded:
            return exposed, hidden
        if run.framework != "megatron":
            return exposed + self._collective("all_gather", 2 * self.params, layout.shards), hidden
        # The updated parameters' way back: in Megatron block by block.
        gathered, beside = self._beside("all_gather", 2, layout.shards, self.costs.forward.seconds)
        return exposed + gathered, hidden + beside


def reduce_behind(pieces: int, backward: float, reduce: float, ends: float = 0.0) -> tuple[float, float]:
    """Returns exposed and hidden seconds of reductions: one behind each piece of a backward, and one of the ends."""
    timeline = Timeline()
    last = timeline.add("compute", 0.0)  # a stage may have an end of the model alone
    for _ in range(pieces):
        last = timeline.add("compute", backward)
        timeline.add("link", reduce, after=(last,))
    timeline.add("link", ends, after=(last,))
    exposed = timeline.idle("compute")
    return exposed, max(0.0, timeline.busy("link") - exposed)
