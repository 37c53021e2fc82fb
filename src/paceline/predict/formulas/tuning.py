"""What tuning changes in a step's time: buckets of gradients, parameters that stay gathered, offload, zero bubbles.

For p parameters of a rank's part, S ranks that share its states, m microbatches, N data ranks and a backward of b
seconds:

    buckets       n = bytes / bucket of them, each c seconds on the link, each ready b/n after the one before:
                  exposed = c where the link keeps up (c <= b/n), else n c - b (n-1)/n
    gathered      backward gathers nothing: one all-gather of 2 p bytes less in each microbatch
    offload       copies over the bus, and what the host does itself, where they hold the device up: offload.py
    zero bubble   the bubble is (F + B - W) / (F + B + W) of 1f1b's for zb-h1, and of that of two chunks for zb-v, for a
                  forward F and a backward of inputs B and weights W (``schedule/schedules.py``)
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.cluster.devices import Catalog, Cluster
from paceline.cluster.nccl import Collective, collective_seconds, group_of
from paceline.plan.layout import Offload
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Recompute, Workload, stage_layers
from paceline.predict.formulas.block import CALL_S
from paceline.predict.formulas.constants import Constants, constants_for, fitted_constants
from paceline.predict.formulas.offload import Offloaded, OffloadedUnit
from paceline.predict.formulas.step import StepParts
from paceline.predict.memory.footprint import Footprint
from paceline.units import MIB

BUCKETS_MB = (100, 400)
_MOST_PIECES = 32  # of a transformer, where a walk goes through them
PIECES = 8  # of a model known by its samples: what is gathered, and reduced, together
# Of the host, for one rank and for all of a node. One rank: a fused AdamW of 3.4 billion parameters beside an H200, 16
# cores (bench/results/memory-h200.json). A node: [assumed] 0.78 of two sockets with eight channels of DDR5-4800 each.
_RANK_HOST_BYTES_PER_S = 120e9
_NODE_HOST_BYTES_PER_S = 480e9
# The bus of a device that has another link to its neighbours, by generation: [assumed] the newest of its time.
_BUSES = {"volta": "pcie3-x16", "turing": "pcie3-x16", "hopper": "pcie5-x16", "blackwell": "pcie5-x16"}
_OTHER_BUS = "pcie4-x16"
# Forward, and what backward adds to the gradients of inputs and weights, in forwards.
_AGAIN: dict[Recompute, float] = {"none": 0.0, "selective": 0.5, "attention": 0.2, "full": 1.0}


def tuned_step(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """Returns what a step takes with a layout's schedule and tuning, from what it takes with 1f1b and defaults."""
    layout = workload.layout
    if layout.splits_backward:
        step = replace(step, bubble=step.bubble * zero_bubble_share(workload.recompute))
    if not layout.is_fully_sharded and layout.data > 1:
        step = _bucketed(step, workload, cluster)
    if not layout.reshard_after_forward:
        step = _gathered_once(step, workload, cluster)
    return _offloaded(step, workload, cluster) if _offload_of(workload).is_any else step


def tuned_footprint(found: Footprint, workload: Workload) -> Footprint:
    """Returns what a rank's device holds: states that are offloaded are on the host.

    A slice to gather from stays, and in the buckets of zero1 the whole gradients.
    """
    offload, layout = _offload_of(workload), workload.layout
    if not layout.reshard_after_forward:
        found = replace(found, temporary=found.temporary + 2 * part_params(workload))
    if not offload.is_any:
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


def zero_bubble_share(recompute: Recompute) -> float:
    """Returns the bubble of a zero-bubble schedule as a share of the same without; W and B take a forward each."""
    again = _AGAIN[recompute]
    return (1 + again) / (3 + again)


def part_params(workload: Workload) -> float:
    """Returns the parameters of a rank's part of the model, before data ranks share it."""
    model, layout = workload.model, workload.layout
    if not isinstance(model, ModelShape):
        return model.params
    layers = stage_layers(model.layers, layout.pipeline)[0]
    each = model.attention_params + model.mlp_params / layout.expert
    return (layers * each + model.end_params) / layout.tensor


def constants_of(workload: Workload, cluster: Cluster) -> Constants:
    """Returns the fitted constants that a workload is priced with."""
    return constants_for(fitted_constants(), cluster.device.generation, workload.run.framework)[0]


def collective_of(kind: Collective, num_bytes: float, workload: Workload, cluster: Cluster, ranks: int) -> float:
    """Returns what a collective of so many data-parallel neighbours takes in training."""
    alone = collective_seconds(kind, num_bytes, group_of(cluster, ranks, workload.layout.tensor), cluster)
    return (alone + CALL_S) * constants_of(workload, cluster).slowdown if alone else 0.0


def _bucketed(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """The difference that buckets make against the pieces of which ``step`` is: blocks, or eighths of a model."""
    model, layout = workload.model, workload.layout
    pieces = stage_layers(model.layers, layout.pipeline)[0] if isinstance(model, ModelShape) else PIECES
    num_bytes = part_params(workload) * _gradient_bytes(workload)
    exposed, hidden = _in_pieces(step, workload, cluster, math.ceil(num_bytes / (layout.bucket_mb * MIB)))
    before, hidden_before = _in_pieces(step, workload, cluster, pieces)
    times = workload.microbatches if layout.strategy == "zero2" else 1
    exposed = max(0.0, step.exposed + times * (exposed - before))
    return _moved(step, workload, cluster, exposed, max(0.0, step.hidden + times * (hidden - hidden_before)))


def _in_pieces(step: StepParts, workload: Workload, cluster: Cluster, number: int) -> tuple[float, float]:
    number = max(1, number)
    num_bytes = part_params(workload) * _gradient_bytes(workload)
    kind: Collective = "all_reduce" if workload.layout.strategy == "ddp" else "reduce_scatter"
    each = collective_of(kind, num_bytes / number, workload, cluster, workload.layout.data)
    backward = 2 / 3 * (step.compute + step.tensor_wait + step.launch_wait) / workload.microbatches
    exposed = each if each <= backward / number else number * each - backward * (number - 1) / number
    return exposed, max(0.0, number * each - exposed)


def _gradient_bytes(workload: Workload) -> int:
    return 4 if workload.run.is_wide or not isinstance(workload.model, ModelShape) else 2


def _gathered_once(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """What was exposed goes first; the two ends of a microbatch, which nothing hides, stay."""
    again = collective_of("all_gather", 2 * part_params(workload), workload, cluster, workload.layout.shards)
    saved = again * workload.microbatches
    model = workload.model
    blocks = model.layers if isinstance(model, ModelShape) else PIECES
    ends = min(step.exposed, 2 * again / blocks * workload.microbatches)
    exposed = max(ends, step.exposed - saved)
    hidden = max(0.0, step.hidden - (saved - (step.exposed - exposed)))
    return _moved(step, workload, cluster, exposed, hidden)


def _offload_of(workload: Workload) -> Offload:
    """What moves: gradients alone stay on one rank that keeps no masters, where they are those of the parameters."""
    offload = workload.layout.offload
    is_plain = workload.layout.shards == 1 and workload.run.is_wide and not offload.optimizer
    return Offload() if is_plain else offload


def _offloaded(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """What the host works is told as the optimizer's part, which is all its doing."""
    copies, work = _walked(step, workload, cluster).added()
    optimizer = work if workload.layout.offload.optimizer else step.optimizer + work
    return replace(step, exposed=step.exposed + copies, optimizer=optimizer)


def _walked(step: StepParts, workload: Workload, cluster: Cluster) -> Offloaded:
    """Returns a step in pieces: its blocks and, under full sharding, the ends, or eighths of a model."""
    model, layout, ranks = workload.model, workload.layout, workload.layout.shards
    width = 4 if workload.run.is_wide else 2
    count = min(model.layers, _MOST_PIECES) if isinstance(model, ModelShape) else PIECES
    params = part_params(workload)
    ends = model.end_params if isinstance(model, ModelShape) else 0.0
    busy = (step.compute + step.launch_wait) / workload.microbatches / count
    forward = busy / (3 + _AGAIN[workload.recompute])

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


def bus_bytes_per_s(cluster: Cluster) -> float:
    """Returns what a device's bus to its host carries one way."""
    inside = cluster.node.inside
    link = inside if inside.kind == "pcie" else Catalog().link(_BUSES.get(cluster.device.generation, _OTHER_BUS))
    return link.reached


def host_bytes_per_s(cluster: Cluster) -> float:
    """Returns what a rank's host reads and writes, while the other ranks of its node do the same."""
    return min(_RANK_HOST_BYTES_PER_S, _NODE_HOST_BYTES_PER_S / cluster.node.devices)


def _moved(step: StepParts, workload: Workload, cluster: Cluster, exposed: float, hidden: float) -> StepParts:
    contention = constants_of(workload, cluster).contention * (hidden - step.hidden)
    return replace(step, exposed=exposed, hidden=hidden, contention=max(0.0, step.contention + contention))
