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
from paceline.plan.workload import Recompute, SampleModel, Workload
from paceline.predict.formulas.block import CALL_S
from paceline.predict.formulas.predict import Prediction, predict
from paceline.predict.formulas.step import StepSeconds
from paceline.predict.formulas.tuning import (
    PIECES,
    collective_of,
    constants_of,
    part_params,
    tuned_footprint,
    tuned_step,
)
from paceline.predict.memory.footprint import Footprint, footprint
from paceline.predict.replay.timeline import Timeline
from paceline.search.candidates import Candidate

# Of a step's computing: a forward is a third of it, and products are most of that.
_AGAIN: dict[Recompute, float] = {"none": 0.0, "selective": 0.1, "attention": 0.1, "full": 1 / 3}


def price(candidate: Candidate, cluster: Cluster) -> Prediction:
    """Predicts a step of a candidate as the engines here run it. ``memory`` and ``fits`` are of the formula alone."""
    return with_tuning(price_untuned(candidate, cluster), candidate, cluster)


def price_untuned(candidate: Candidate, cluster: Cluster) -> Prediction:
    """Predicts it with 1f1b or plain interleaving, and before tuning: the part that takes long, and is the same."""
    workload = candidate.workload
    found = predict(workload, cluster)
    step = found.step
    if isinstance(workload.model, SampleModel):
        step = _of_samples(step, candidate, cluster)
    elif candidate.strategy == "zero2" and workload.microbatches > 1:
        step = _reduced_each_time(step, workload, cluster)
    elif workload.layout.sharding == "fsdp" and workload.layout.pipeline > 1:
        step = _times(step, workload.microbatches)
    if candidate.strategy == "hybrid":
        step = _averaged_between_groups(step, candidate, cluster)
    return replace(found, step=step)


def with_tuning(found: Prediction, candidate: Candidate, cluster: Cluster) -> Prediction:
    """Returns an untuned prediction with the candidate's schedule and tuning."""
    memory = candidate_footprint(candidate)
    outside = (*found.outside, *_never_published(candidate, cluster))
    return replace(
        found,
        step=tuned_step(found.step, candidate, cluster),
        memory=memory,
        fits=memory.total <= cluster.device.memory_bytes,
        fitted=found.fitted and not outside,
        outside=outside,
    )


def _never_published(candidate: Candidate, cluster: Cluster) -> Iterator[str]:
    """What no run is like that constants were fitted on, whatever its sizes."""
    if candidate.offload:
        yield "offloaded states: no published run has them"
    if candidate.zero_bubble:
        yield "a zero-bubble schedule: no published run has one"
    if cluster.device.is_cpu:
        yield "processors are priced by the formulas of GPUs: paceline predict goes by operators, as they were measured"


def engine_footprint(workload: Workload) -> Footprint:
    """Returns what a rank holds by the formulas of ``footprint``, with the states that the engines here keep."""
    found = footprint(replace(workload, run=replace(workload.run, framework="eager")))
    return found if not isinstance(workload.model, SampleModel) else _shared(found, workload)


def candidate_footprint(candidate: Candidate) -> Footprint:
    """Returns the same for a candidate, without what it offloads."""
    return tuned_footprint(engine_footprint(candidate.workload), candidate)


def _shared(found: Footprint, workload: Workload) -> Footprint:
    layout = workload.layout
    shards, is_fully = layout.shards, layout.sharding == "fsdp"
    return replace(
        found,
        parameters=found.parameters / (shards if is_fully else 1),
        gradients=found.gradients / (shards if is_fully or layout.sharding == "zero2" else 1),
        optimizer=found.optimizer / shards,
    )


def _of_samples(step: StepSeconds, candidate: Candidate, cluster: Cluster) -> StepSeconds:
    workload = candidate.workload
    step = replace(step, compute=step.compute * (1 + _AGAIN[candidate.recompute]))
    if candidate.strategy == "ddp":
        return step
    exposed, hidden = _shared_seconds(step, candidate, cluster)
    contention = constants_of(workload, cluster).contention * hidden
    optimizer = step.optimizer / candidate.shard
    return replace(step, exposed=exposed, hidden=hidden, contention=contention, optimizer=optimizer)


def _shared_seconds(step: StepSeconds, candidate: Candidate, cluster: Cluster) -> tuple[float, float]:
    """Exposed and hidden seconds of a step, on the event core: a microbatch in units, all microbatches alike."""
    workload, ranks = candidate.workload, candidate.shard
    count, is_fully = workload.microbatches, workload.layout.sharding == "fsdp"
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
    times = 1 if candidate.strategy == "zero1" else count
    exposed = timeline.idle("compute") * times
    hidden = max(0.0, timeline.busy("link") * times - exposed)
    return (exposed, hidden) if is_fully else (exposed + PIECES * gather, hidden)


def _times(step: StepSeconds, count: float) -> StepSeconds:
    return replace(step, exposed=step.exposed * count, hidden=step.hidden * count, contention=step.contention * count)


def _reduced_each_time(step: StepSeconds, workload: Workload, cluster: Cluster) -> StepSeconds:
    """The exposed part holds one gather of all parameters, which stays one."""
    gather = collective_of("all_gather", part_params(workload) * 2, workload, cluster, workload.layout.data)
    gather = min(step.exposed, gather)
    again = _times(replace(step, exposed=step.exposed - gather), workload.microbatches)
    return replace(again, exposed=again.exposed + gather)


def _averaged_between_groups(step: StepSeconds, candidate: Candidate, cluster: Cluster) -> StepSeconds:
    """The last microbatch's backward, two thirds of its compute, hides what its own gathers have left room for."""
    workload = candidate.workload
    constants = constants_of(workload, cluster)
    group = group_of(cluster, workload.layout.data // candidate.shard, workload.layout.tensor * candidate.shard)
    num_bytes = part_params(workload) * 4 / candidate.shard
    seconds = (collective_seconds("all_reduce", num_bytes, group, cluster) + CALL_S) * constants.slowdown
    room = max(0.0, (2 / 3 * step.compute - step.hidden) / workload.microbatches)
    hidden = min(seconds, room)
    return replace(
        step,
        exposed=step.exposed + seconds - hidden,
        hidden=step.hidden + hidden,
        contention=step.contention + constants.contention * hidden,
    )
