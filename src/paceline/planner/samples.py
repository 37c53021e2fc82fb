"""What a data-parallel step takes for models known by what a sample costs: convolutional, recurrent, translation.

step = max(device, host) for each microbatch + gradients that nothing hides + the slowest of N ranks' spread

device   3 x FLOPs / (ceiling x rate of the kind) + passes x activations x bytes / bandwidth
spread   sigma E[max of N normal deviates]: batches of sentences differ in length from rank to rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cluster.devices import Cluster
from paceline.cluster.kernels import ceiling, memory_seconds
from paceline.cluster.nccl import collective_seconds, group_of
from paceline.planner.block import CALL_S
from paceline.planner.constants import Constants
from paceline.planner.step import StepSeconds
from paceline.planner.timeline import Timeline
from paceline.planner.workload import SampleModel, Workload

_BUCKETS = 8
_OPTIMIZER_BYTES = 40


@dataclass(frozen=True, slots=True)
class _Kind:
    rate: float  # of the rate of ordinary convolutions
    passes: float  # over each activation, forward and backward
    spread: float


_KINDS = {
    "convolution": _Kind(1.0, 14, 0.005),
    "depthwise": _Kind(0.6, 24, 0.005),
    "recurrent": _Kind(0.8, 12, 0.06),
    "attention": _Kind(1.0, 12, 0.05),
}


def sample_step(workload: Workload, cluster: Cluster, constants: Constants) -> StepSeconds:
    """Returns what a step takes."""
    model, run, layout = workload.model, workload.run, workload.layout
    assert isinstance(model, SampleModel)
    kind = _KINDS[model.kind]
    width, passes = _traffic(workload, kind)
    rate = ceiling(cluster.device, run.compute) * constants.convolution * kind.rate
    moved = run.micro_batch * model.activations * width * passes * constants.traffic
    device = 3 * run.micro_batch * model.flops / rate + memory_seconds(cluster.device, constants.rates, moved)
    host = 3 * model.kernels * constants.launch_us * 1e-6
    each = max(device, host)
    exposed, hidden = _gradients(model, layout.data, each * 2 / 3, cluster, constants)
    times = workload.microbatches
    spread = times**0.5 * each * kind.spread * _expected_most(layout.data)
    return StepSeconds(
        compute=times * device,
        tensor_wait=0.0,
        launch_wait=times * max(0.0, host - device),
        bubble=spread,
        exposed=exposed,
        hidden=hidden,
        contention=constants.contention * hidden,
        optimizer=memory_seconds(cluster.device, constants.rates, model.params * _OPTIMIZER_BYTES),
    )


def _traffic(workload: Workload, kind: _Kind) -> tuple[float, float]:
    """Bytes of an element, and passes over it. Mixed precision keeps losses, norms and copies in fp32; convolutions
    then run channels last, with norm and activation in one kernel."""
    model, run = workload.model, workload.run
    assert isinstance(model, SampleModel)
    if run.compute in ("fp32", "tf32"):
        return 4.0, kind.passes
    return (2.0, 0.75 * kind.passes) if model.kind == "convolution" else (3.0, kind.passes)


def _gradients(
    model: SampleModel, ranks: int, backward: float, cluster: Cluster, constants: Constants
) -> tuple[float, float]:
    if ranks == 1:
        return 0.0, 0.0
    group = group_of(cluster, ranks)
    num_bytes = model.params * 4 / _BUCKETS
    each = (collective_seconds("all_reduce", num_bytes, group, cluster) + CALL_S) * constants.slowdown
    timeline = Timeline()
    for _ in range(_BUCKETS):
        last = timeline.add("compute", backward / _BUCKETS)
        timeline.add("link", each, after=(last,))
    exposed = timeline.end - timeline.busy("compute")
    return exposed, timeline.busy("link") - exposed


def _expected_most(ranks: int) -> float:
    """The expected largest of so many normal deviates, nearly."""
    return 0.0 if ranks == 1 else math.sqrt(2 * math.log(ranks)) * (1 - 0.22 / math.log(ranks + 1))
