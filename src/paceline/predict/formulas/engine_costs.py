"""What a step takes in the engines here: ``predict`` follows the frameworks of published runs, and this what differs.

For k microbatches a step, R replicas of a group of S ranks that share the states, p parameters of a rank's part and a
backward of b seconds:

    zero2              a reduce-scatter in every microbatch:       k - 1 more of them
    fsdp in a pipeline gathers and reduces in every microbatch:    k times those of one
    hybrid             an all-reduce of 4 p / S bytes over R, once a step, behind the last backward

and by tuning:

    buckets            n = bytes / bucket of them, each c seconds on the link, each ready b/n after the one before:
                       exposed = c where the link keeps up (c <= b/n), else n c - b (n-1)/n
    gathered           backward gathers nothing: one all-gather of 2 p bytes less in each microbatch
    offload            copies over the bus, and what the host does itself, where they hold the device up: offload.py
    zero bubble        the bubble is (F + B - W) / (F + B + W) of 1f1b's for zb-h1, and of that of two chunks for zb-v,
                       for a forward F and a backward of inputs B and weights W (``schedule/schedules.py``)

Models known by what a sample costs are predicted under ddp alone; shared states send what they do for any model (4 p
bytes in a reduce-scatter and an all-gather; fully sharded 4 p in each of two gathers and a reduce-scatter, each
microbatch anew), and what is computed again is a share of the forward.

Memory: masters, gradients and two moments are 16 bytes a parameter here, compiled or not.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.cluster.devices import Catalog, Cluster
from paceline.cluster.sequence_costs import typical_documents
from paceline.cluster.wires import Collective, collective_seconds, group_of
from paceline.plan.layout import Offload
from paceline.plan.plan import MemoryEstimate
from paceline.plan.workload import Recompute, Workload, stage_layers
from paceline.predict.formulas.block import CALL_S, BlockModel
from paceline.predict.formulas.constants import Constants, constants_for, fitted_constants
from paceline.predict.formulas.offload import Offloaded, OffloadedUnit
from paceline.predict.formulas.step import Prediction, StepParts, in_training, predict
from paceline.predict.memory.memory import UPDATE_BYTES, footprint
from paceline.schedule.clock import Timeline
from paceline.schedule.ring import SequenceMethod
from paceline.units import MIB

BUCKETS_MB = (100, 400)
_MOST_PIECES = 32  # of a transformer, where a walk goes through them
_PIECES = 8  # of a model known by its samples: what is gathered, and reduced, together
# Of the host, for one rank and for all of a node. One rank: a fused AdamW of 3.4 billion parameters beside an H200, 16
# cores (bench/results/memory-h200.json). A node: [assumed] 0.78 of two sockets with eight channels of DDR5-4800 each.
_RANK_HOST_BYTES_PER_S = 120e9
_NODE_HOST_BYTES_PER_S = 480e9
# The bus of a device that has another link to its neighbours, by generation: [assumed] the newest of its time.
_BUSES = {"volta": "pcie3-x16", "turing": "pcie3-x16", "hopper": "pcie5-x16", "blackwell": "pcie5-x16"}
_OTHER_BUS = "pcie4-x16"
# What backward computes again: in forwards; and of a model known by its samples, as a share of a step's computing.
_AGAIN: dict[Recompute, float] = {"none": 0.0, "selective": 0.5, "attention": 0.2, "full": 1.0}
AGAIN_OF_STEP: dict[Recompute, float] = {"none": 0.0, "selective": 0.1, "attention": 0.1, "full": 1 / 3}


def price(workload: Workload, cluster: Cluster) -> Prediction:
    return with_tuning(price_untuned(workload, cluster), workload, cluster)


def price_untuned(workload: Workload, cluster: Cluster) -> Prediction:
    """Predicts it with 1f1b or plain interleaving, and before tuning: the part that takes long, and is the same."""
    layout, found = workload.layout, predict(workload, cluster, is_ours=True)
    step = found.step
    if workload.model.is_sampled:
        step = _of_samples(step, workload, cluster)
    elif layout.strategy == "zero2" and workload.microbatches > 1:
        # The exposed part holds one gather of all parameters, which stays one.
        gather = collective_of("all_gather", part_params(workload) * 2, workload, cluster, layout.data)
        gather = min(step.exposed, gather)
        again = _times(replace(step, exposed=step.exposed - gather), workload.microbatches)
        step = replace(again, exposed=again.exposed + gather)
    elif layout.is_fully_sharded and layout.pipeline > 1:
        step = _times(step, workload.microbatches)
    if layout.strategy == "hybrid":
        # The last microbatch's backward, two thirds of its compute, hides what its own gathers have left room for.
        constants = _constants_of(workload, cluster)
        group = group_of(cluster, layout.data // layout.shards, layout.tensor * layout.shards)
        num_bytes = part_params(workload) * 4 / layout.shards
        seconds = (collective_seconds("all_reduce", num_bytes, group, cluster) + CALL_S) * constants.slowdown
        hidden = min(seconds, max(0.0, (2 / 3 * step.compute - step.hidden) / workload.microbatches))
        contention = step.contention + constants.contention * hidden
        exposed = step.exposed + seconds - hidden
        step = replace(step, exposed=exposed, hidden=step.hidden + hidden, contention=contention)
    return replace(found, step=step)


def with_tuning(found: Prediction, workload: Workload, cluster: Cluster) -> Prediction:
    """Returns an untuned prediction with the schedule and tuning of a workload's layout."""
    layout, memory, step = workload.layout, engine_footprint(workload), found.step
    if layout.splits_backward:
        step = replace(step, bubble=step.bubble * zero_bubble_share(workload.recompute, workload.recomputed_blocks))
    if not layout.is_fully_sharded and layout.data > 1:
        step = _bucketed(step, workload, cluster)
    if not layout.reshard_after_forward:
        step = _gathered_once(step, workload, cluster)
    if _offload_of(workload).moves_states:
        # What the host works is told as the optimizer's part, which is all its doing.
        copies, work = _walked(step, workload, cluster).added()
        optimizer = work if layout.offload.optimizer else step.optimizer + work
        step = replace(step, exposed=step.exposed + copies, optimizer=optimizer)
    if layout.offload.activations:
        step = replace(step, exposed=step.exposed + _inputs_waited_for(step, workload, cluster))
    # What no run is like that constants were fitted on, whatever its sizes.
    never_published = {
        "offloaded states: no published run has them": layout.offload.moves_states,
        "a zero-bubble schedule: no published run has one": layout.splits_backward,
        "processors are priced by the formulas of GPUs: paceline predict goes by operators, as they were measured": (
            cluster.device.is_cpu
        ),
    }
    return replace(
        found,
        workload=workload,
        step=step,
        memory=memory,
        fits=memory.device_bytes <= cluster.device.memory_bytes,
        peak_flops=cluster.device.peak(workload.run.compute),
        outside=(*found.outside, *(reason for reason, is_so in never_published.items() if is_so)),
    )


def engine_footprint(workload: Workload) -> MemoryEstimate:
    """Returns what a rank's device holds by ``footprint``, with the states that the engines here keep."""
    found = footprint(replace(workload, run=replace(workload.run, framework="eager")), UPDATE_BYTES)
    offload, layout = _offload_of(workload), workload.layout
    if workload.model.is_sampled:
        shared = {"optimizer", *(("gradients",) if layout.sharing.gradients else ())}
        shared |= {"parameters"} if layout.sharing.parameters else set()
        found = replace(found, **{name: getattr(found, name) / layout.shards for name in shared})
    if not layout.reshard_after_forward:
        found = replace(found, temporary=found.temporary + 2 * part_params(workload))
    if not offload.moves_states:
        return found
    if not offload.optimizer:  # gradients alone: those of the last microbatch come as its activations go
        temporary = found.temporary + max(0.0, found.gradients - found.activations)
        return replace(found, gradients=0.0, temporary=temporary)
    whole = (4 if workload.run.is_wide else 2) * part_params(workload)
    resident = 0.0 if offload.parameters else whole / layout.shards
    return replace(
        found,
        parameters=resident if layout.is_fully_sharded else whole + resident,
        gradients=0.0 if layout.sharing.gradients else found.gradients,
        optimizer=0.0,
    )


def zero_bubble_share(recompute: Recompute, blocks: float = 1.0) -> float:
    """Returns the bubble of a zero-bubble schedule as a share of the same without; W and B take a forward each."""
    again = _AGAIN[recompute] * blocks
    return (1 + again) / (3 + again)


def part_params(workload: Workload) -> float:
    """Returns the parameters of a rank's part of the model, before data ranks share it."""
    model, layout = workload.model, workload.layout
    if model.is_sampled:
        return model.params
    layers = stage_layers(model.layers, layout.pipeline)[0]
    each = model.other_params + model.routed_params / layout.expert
    return (layers * each + model.end_params) / layout.tensor


def collective_of(kind: Collective, num_bytes: float, workload: Workload, cluster: Cluster, ranks: int) -> float:
    """Returns what a collective of so many data-parallel neighbours takes in training."""
    group = group_of(cluster, ranks, workload.layout.tensor)
    return in_training(kind, num_bytes, group, cluster, _constants_of(workload, cluster))


def _constants_of(workload: Workload, cluster: Cluster) -> Constants:
    return constants_for(fitted_constants(), cluster.device.generation, workload.run.framework)[0]


def context_method(workload: Workload, cluster: Cluster, *, document_tokens: int = 0) -> SequenceMethod:
    """Returns the method by which ranks that share each sequence wait least, or the layout's own.

    ``document_tokens``: the mean of a document, where rows have many that do not see one another.
    """
    block = BlockModel(workload, cluster, _constants_of(workload, cluster), is_ours=True)
    documents = typical_documents(workload.run.seq_len, document_tokens) if document_tokens else (0,)
    return block.sequence_split(documents)[0].method


def _of_samples(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """Shares the states of a model known by its samples, on the event core: a microbatch in units, all alike."""
    layout, count, is_fully = workload.layout, workload.microbatches, workload.layout.is_fully_sharded
    step = replace(step, compute=step.compute * (1 + AGAIN_OF_STEP[workload.recompute] * workload.recomputed_blocks))
    if layout.strategy == "ddp":
        return step
    num_bytes = 4 * part_params(workload) / _PIECES
    gather = collective_of("all_gather", num_bytes, workload, cluster, layout.shards)
    reduce = collective_of("reduce_scatter", num_bytes, workload, cluster, layout.shards)
    computed = (step.compute + step.launch_wait) / count / 3 / _PIECES
    timeline = Timeline()
    for place in range(2 * _PIECES):
        is_backward = place >= _PIECES
        here = [timeline.add("link", gather)] if is_fully else []
        last = timeline.add("compute", computed * (2 if is_backward else 1), after=here)
        if is_backward:
            timeline.add("link", reduce, after=(last,))
    times = count if layout.sharing.gradients else 1
    exposed = timeline.idle("compute") * times
    hidden = max(0.0, timeline.busy("link") * times - exposed)
    return replace(
        step,
        exposed=exposed if is_fully else exposed + _PIECES * gather,
        hidden=hidden,
        contention=_constants_of(workload, cluster).contention * hidden,
        optimizer=step.optimizer / layout.shards,
    )


def _times(step: StepParts, count: float) -> StepParts:
    return replace(step, exposed=step.exposed * count, hidden=step.hidden * count, contention=step.contention * count)


def _bucketed(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """The difference that buckets make against the pieces of which ``step`` is: blocks, or eighths of a model."""
    model, layout = workload.model, workload.layout
    pieces = _PIECES if model.is_sampled else stage_layers(model.layers, layout.pipeline)[0]
    num_bytes = part_params(workload) * (4 if workload.run.is_wide or model.is_sampled else 2)
    kind: Collective = "all_reduce" if layout.strategy == "ddp" else "reduce_scatter"
    backward = 2 / 3 * (step.compute + step.tensor_wait + step.launch_wait) / workload.microbatches

    def in_pieces(number: int) -> tuple[float, float]:
        number = max(1, number)
        each = collective_of(kind, num_bytes / number, workload, cluster, layout.data)
        exposed = each if each <= backward / number else number * each - backward * (number - 1) / number
        return exposed, max(0.0, number * each - exposed)

    exposed, hidden = in_pieces(math.ceil(num_bytes / (layout.bucket_mb * MIB)))
    before, hidden_before = in_pieces(pieces)
    times = workload.microbatches if layout.strategy == "zero2" else 1
    exposed = max(0.0, step.exposed + times * (exposed - before))
    return _moved(step, workload, cluster, exposed, max(0.0, step.hidden + times * (hidden - hidden_before)))


def _gathered_once(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """What was exposed goes first; the two ends of a microbatch, which nothing hides, stay."""
    again = collective_of("all_gather", 2 * part_params(workload), workload, cluster, workload.layout.shards)
    saved = again * workload.microbatches
    blocks = _PIECES if workload.model.is_sampled else workload.model.layers
    ends = min(step.exposed, 2 * again / blocks * workload.microbatches)
    exposed = max(ends, step.exposed - saved)
    hidden = max(0.0, step.hidden - (saved - (step.exposed - exposed)))
    return _moved(step, workload, cluster, exposed, hidden)


def _moved(step: StepParts, workload: Workload, cluster: Cluster, exposed: float, hidden: float) -> StepParts:
    contention = _constants_of(workload, cluster).contention * (hidden - step.hidden)
    return replace(step, exposed=exposed, hidden=hidden, contention=max(0.0, step.contention + contention))


def _offload_of(workload: Workload) -> Offload:
    """What moves: gradients alone stay on one rank that keeps no masters, where they are those of the parameters."""
    offload = workload.layout.offload
    is_plain = workload.layout.shards == 1 and workload.run.is_wide and not offload.optimizer
    return Offload() if is_plain else offload


def _walked(step: StepParts, workload: Workload, cluster: Cluster) -> Offloaded:
    """Returns a step in pieces: its blocks and, under full sharding, the ends, or eighths of a model."""
    model, layout, ranks = workload.model, workload.layout, workload.layout.shards
    width = 4 if workload.run.is_wide else 2
    count = _PIECES if model.is_sampled else min(model.layers, _MOST_PIECES)
    params = part_params(workload)
    ends = 0.0 if model.is_sampled else model.end_params
    busy = (step.compute + step.launch_wait) / workload.microbatches / count
    forward = busy / (3 + _AGAIN[workload.recompute] * workload.recomputed_blocks)

    def piece(share: float, seconds: float) -> OffloadedUnit:
        return OffloadedUnit(
            params=share / ranks,
            forward=seconds,
            backward=seconds * (busy / forward - 1),
            gather=collective_of("all_gather", width * share, workload, cluster, ranks),
            reduce=collective_of("reduce_scatter", 4 * share, workload, cluster, ranks),
        )

    is_fully = layout.is_fully_sharded
    each = piece((params - ends if is_fully else params) / count, forward)
    return Offloaded(
        layout=layout,
        pieces=(*((piece(ends, 0.0),) if is_fully else ()), *[each] * count),
        width=width,
        bus=bus_bytes_per_s(cluster),
        host=host_bytes_per_s(cluster),
    )


def _inputs_waited_for(step: StepParts, workload: Workload, cluster: Cluster) -> float:
    """Returns what inputs of blocks take on their way to the host and back beyond the blocks that compute meanwhile."""
    model, width = workload.model, 4 if workload.run.is_wide else 2
    blocks = _PIECES if model.is_sampled else stage_layers(model.layers, workload.layout.pipeline)[0]
    # Of a model known by its samples, at most half of what it makes: what a block reads, and what it makes of that.
    numbers = (
        workload.micro_batch * model.activations / blocks / 2 if model.is_sampled else workload.tokens * model.width
    )
    moved = numbers * width / bus_bytes_per_s(cluster)
    busy = (step.compute + step.launch_wait) / workload.microbatches / blocks
    forward = busy / (3 + _AGAIN[workload.recompute] * workload.recomputed_blocks)
    late = max(0.0, moved - forward) + max(0.0, moved - (busy - forward))
    return workload.microbatches * blocks * workload.recomputed_blocks * late


def bus_bytes_per_s(cluster: Cluster) -> float:
    inside = cluster.node.inside
    link = inside if inside.kind == "pcie" else Catalog().link(_BUSES.get(cluster.device.generation, _OTHER_BUS))
    return link.reached


def host_bytes_per_s(cluster: Cluster) -> float:
    """Returns what a rank's host reads and writes, while the other ranks of its node do the same."""
    return min(_RANK_HOST_BYTES_PER_S, _NODE_HOST_BYTES_PER_S / cluster.node.devices)
