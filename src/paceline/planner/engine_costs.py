"""What this package's engines send beside what ``predict`` prices, which follows the frameworks of published runs.

For m microbatches a step, R replicas of a group of S ranks that share the states, p parameters of a rank's part:

    zero2                     a reduce-scatter in every microbatch:       m - 1 more of them
    fsdp in a pipeline        gathers and reduces in every microbatch:    m times those of one
    hybrid                    an all-reduce of 4 p / S bytes over R, once a step, behind the last backward

Memory: masters, gradients and two moments are 16 bytes a parameter here, compiled or not.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.cluster.devices import Cluster
from paceline.cluster.nccl import collective_seconds, group_of
from paceline.planner.block import CALL_S
from paceline.planner.candidates import Candidate
from paceline.planner.constants import Constants, constants_for, fitted_constants
from paceline.planner.footprint import Footprint, footprint
from paceline.planner.predict import Prediction, predict
from paceline.planner.step import StepSeconds, stage_layers
from paceline.planner.workload import ModelShape, Workload


def price(candidate: Candidate, cluster: Cluster) -> Prediction:
    """Predicts a step of a candidate as the engines here run it. ``memory`` and ``fits`` are of the formula alone."""
    workload = candidate.workload
    found = predict(workload, cluster)
    step = found.step
    if candidate.strategy == "zero2" and workload.microbatches > 1:
        step = _reduced_each_time(step, workload, cluster)
    if workload.layout.sharding == "fsdp" and workload.layout.pipeline > 1:
        step = _times(step, workload.microbatches)
    if candidate.strategy == "hybrid":
        step = _averaged_between_groups(step, candidate, cluster)
    memory = engine_footprint(workload)
    return replace(found, step=step, memory=memory, fits=memory.total <= cluster.device.memory_bytes)


def engine_footprint(workload: Workload) -> Footprint:
    """Returns what a rank holds by the formulas of ``footprint``, with the states that the engines here keep."""
    return footprint(replace(workload, run=replace(workload.run, framework="eager")))


def _times(step: StepSeconds, count: float) -> StepSeconds:
    return replace(step, exposed=step.exposed * count, hidden=step.hidden * count, contention=step.contention * count)


def _reduced_each_time(step: StepSeconds, workload: Workload, cluster: Cluster) -> StepSeconds:
    """The exposed part holds one gather of all parameters, which stays one."""
    gather = min(step.exposed, _gather_seconds(workload, cluster))
    again = _times(replace(step, exposed=step.exposed - gather), workload.microbatches)
    return replace(again, exposed=again.exposed + gather)


def _averaged_between_groups(step: StepSeconds, candidate: Candidate, cluster: Cluster) -> StepSeconds:
    """The last microbatch's backward, two thirds of its compute, hides what its own gathers have left room for."""
    workload = candidate.workload
    group = group_of(cluster, workload.layout.data // candidate.shard, workload.layout.tensor * candidate.shard)
    num_bytes = _part_params(workload) * 4 / candidate.shard
    seconds = (collective_seconds("all_reduce", num_bytes, group, cluster) + CALL_S) * _constants(
        workload, cluster
    ).slowdown
    room = max(0.0, (2 / 3 * step.compute - step.hidden) / workload.microbatches)
    hidden = min(seconds, room)
    return replace(
        step,
        exposed=step.exposed + seconds - hidden,
        hidden=step.hidden + hidden,
        contention=step.contention + _constants(workload, cluster).contention * hidden,
    )


def _part_params(workload: Workload) -> float:
    model, layout = workload.model, workload.layout
    assert isinstance(model, ModelShape)
    layers = stage_layers(model.layers, layout.pipeline)[0]
    return (layers * model.layer_params + model.end_params) / layout.tensor


def _gather_seconds(workload: Workload, cluster: Cluster) -> float:
    num_bytes = _part_params(workload) * 2
    group = group_of(cluster, workload.layout.data, workload.layout.tensor)
    return (collective_seconds("all_gather", num_bytes, group, cluster) + CALL_S) * _constants(
        workload, cluster
    ).slowdown


def _constants(workload: Workload, cluster: Cluster) -> Constants:
    return constants_for(fitted_constants(), cluster.device.generation, workload.run.framework)[0]
