"""What this package's engines send beside what ``predict`` prices, which follows the frameworks of published runs.

For m microbatches a step, R replicas of a group of S ranks that share the states, p parameters of a rank's part:

    zero2                     a reduce-scatter in every microbatch:       m - 1 more of them
    fsdp in a pipeline        gathers and reduces in every microbatch:    m times those of one
    hybrid                    an all-reduce of 4 p / S bytes over R, once a step, behind the last backward

Models known by what a sample costs are predicted under ddp alone; shared states send what they do for any model (4 p
bytes in a reduce-scatter and an all-gather; fully sharded 4 p in each of two gathers and a reduce-scatter, each
microbatch anew), and what is computed again is a share of the forward.

Memory: masters, gradients and two moments are 16 bytes a parameter here, compiled or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.cluster.devices import Cluster
from paceline.cluster.nccl import collective_seconds, group_of
from paceline.plan.layout import Layout
from paceline.plan.model_shape import SampleModel
from paceline.plan.workload import Recompute, Workload
from paceline.predict.formulas.block import CALL_S
from paceline.predict.formulas.predict import Prediction, predict
from paceline.predict.formulas.step import StepParts
from paceline.predict.formulas.tuning import (
    PIECES,
    collective_of,
    constants_of,
    part_params,
    tuned_footprint,
    tuned_step,
)
from paceline.predict.memory.footprint import Footprint, footprint
from paceline.schedule.clock import Timeline

# Of a step's computing: a forward is a third of it, and products are most of that.
_AGAIN: dict[Recompute, float] = {"none": 0.0, "selective": 0.1, "attention": 0.1, "full": 1 / 3}


def price(workload: Workload, cluster: Cluster) -> Prediction:
    """Predicts a step as the engines here run it. ``memory`` and ``fits`` are of the formula alone."""
    return with_tuning(price_untuned(workload, cluster), workload, cluster)


def price_untuned(workload: Workload, cluster: Cluster) -> Prediction:
    """Predicts it with 1f1b or plain interleaving, and before tuning: the part that takes long, and is the same."""
    layout, found = workload.layout, predict(workload, cluster)
    step = found.step
    if isinstance(workload.model, SampleModel):
        step = _of_samples(step, workload, cluster)
    elif layout.strategy == "zero2" and workload.microbatches > 1:
        step = _reduced_each_time(step, workload, cluster)
    elif layout.is_fully_sharded and layout.pipeline > 1:
        step = _times(step, workload.microbatches)
    if layout.strategy == "hybrid":
        step = _averaged_between_groups(step, workload, cluster)
    return replace(found, step=step)


def with_tuning(found: Prediction, workload: Workload, cluster: Cluster) -> Prediction:
    """Returns an untuned prediction with the schedule and tuning of a workload's layout."""
    memory = engine_footprint(workload)
    return replace(
        found,
        workload=workload,
        step=tuned_step(found.step, workload, cluster),
        memory=memory,
        fits=memory.total <= cluster.device.memory_bytes,
        outside=(*found.outside, *_never_published(workload.layout, cluster)),
    )


def _never_published(layout: Layout, cluster: Cluster) -> Iterator[str]:
    """What no run is like that constants were fitted on, whatever its sizes."""
    if layout.offload.is_any:
        yield "offloaded states: no published run has them"
    if layout.splits_backward:
        yield "a zero-bubble schedule: no published run has one"
    if cluster.device.is_cpu:
        yield "processors are priced by the formulas of GPUs: paceline predict goes by operators, as they were measured"


def engine_footprint(workload: Workload) -> Footprint:
    """Returns what a rank holds by the formulas of ``footprint``, with the states that the engines here keep."""
    found = footprint(replace(workload, run=replace(workload.run, framework="eager")))
    if isinstance(workload.model, SampleModel):
        found = _shared(found, workload.layout)
    return tuned_footprint(found, workload)


def _shared(found: Footprint, layout: Layout) -> Footprint:
    shards, sharing = layout.shards, layout.sharing
    return replace(
        found,
        parameters=found.parameters / (shards if sharing.parameters else 1),
        gradients=found.gradients / (shards if sharing.gradients else 1),
        optimizer=found.optimizer / shards,
    )


def _of_samples(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    step = replace(step, compute=step.compute * (1 + _AGAIN[workload.recompute]))
    if workload.layout.strategy == "ddp":
        return step
    exposed, hidden = _shared_seconds(step, workload, cluster)
    contention = constants_of(workload, cluster).contention * hidden
    optimizer = step.optimizer / workload.layout.shards
    return replace(step, exposed=exposed, hidden=hidden, contention=contention, optimizer=optimizer)


def _shared_seconds(step: StepParts, workload: Workload, cluster: Cluster) -> tuple[float, float]:
    """Exposed and hidden seconds of a step, on the event core: a microbatch in units, all microbatches alike."""
    ranks, count, is_fully = workload.layout.shards, workload.microbatches, workload.layout.is_fully_sharded
    num_bytes = 4 * part_params(workload) / PIECES
    gather = collective_of("all_gather", num_bytes, workload, cluster, ranks)
    reduce = collective_of("reduce_scatter", num_bytes, workload, cluster, ranks)
    computed = (step.compute + step.launch_wait) / count / 3 / PIECES
    timeline = Timeline()
    for place in range(2 * PIECES):
        is_backward = place >= PIECES
        here = [timeline.add("link", gather)] if is_fully else []
        last = timeline.add("compute", computed * (2 if is_backward else 1), after=here)
        if is_backward:
            timeline.add("link", reduce, after=(last,))
    times = count if workload.layout.sharing.gradients else 1
    exposed = timeline.idle("compute") * times
    hidden = max(0.0, timeline.busy("link") * times - exposed)
    return (exposed, hidden) if is_fully else (exposed + PIECES * gather, hidden)


def _times(step: StepParts, count: float) -> StepParts:
    return replace(step, exposed=step.exposed * count, hidden=step.hidden * count, contention=step.contention * count)


def _reduced_each_time(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """The exposed part holds one gather of all parameters, which stays one."""
    gather = collective_of("all_gather", part_params(workload) * 2, workload, cluster, workload.layout.data)
    gather = min(step.exposed, gather)
    again = _times(replace(step, exposed=step.exposed - gather), workload.microbatches)
    return replace(again, exposed=again.exposed + gather)


def _averaged_between_groups(step: StepParts, workload: Workload, cluster: Cluster) -> StepParts:
    """The last microbatch's backward, two thirds of its compute, hides what its own gathers have left room for."""
    constants, layout = constants_of(workload, cluster), workload.layout
    group = group_of(cluster, layout.data // layout.shards, layout.tensor * layout.shards)
    num_bytes = part_params(workload) * 4 / layout.shards
    seconds = (collective_seconds("all_reduce", num_bytes, group, cluster) + CALL_S) * constants.slowdown
    room = max(0.0, (2 / 3 * step.compute - step.hidden) / workload.microbatches)
    hidden = min(seconds, room)
    return replace(
        step,
        exposed=step.exposed + seconds - hidden,
        hidden=step.hidden + hidden,
        contention=step.contention + constants.contention * hidden,
    )
