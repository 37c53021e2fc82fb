"""What a data-parallel step takes for models known by what a sample costs: convolutional, recurrent, translation.

step = max(device, host) for each microbatch + gradients that nothing hides + the slowest of N ranks' spread

device   3 x FLOPs / (ceiling x share of the kind) + bytes / bandwidth
share    convolutions have rates of their own, on 16-bit tensor units and else; other kinds part of matrix products'
bytes    passes x activations; a recurrence reads its weights again for each token of a sentence
spread   sigma E[max of N normal deviates]: batches of sentences differ in length from rank to rank
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.devices import Cluster
from paceline.cluster.kernels import ceiling, memory_seconds
from paceline.cluster.nccl import collective_seconds, group_of
from paceline.plan.model_shape import SampleModel
from paceline.plan.workload import Workload
from paceline.predict.formulas.block import CALL_S
from paceline.predict.formulas.constants import Constants
from paceline.predict.formulas.step import StepParts, expected_most, reduce_behind

_BUCKETS = 8
_OPTIMIZER_BYTES = 40


@dataclass(frozen=True, slots=True)
class _SampleKind:
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


def sample_step(workload: Workload, cluster: Cluster, constants: Constants) -> StepParts:
    """Returns what a step takes."""
    model, run, layout = workload.model, workload.run, workload.layout
    assert isinstance(model, SampleModel)
    kind = _KINDS[model.kind]
    share = constants.matmul
    if kind.convolves:
        share = constants.convolution_wide if run.is_wide else constants.convolution
    rate = ceiling(cluster.device, run.compute) * share * kind.rate
    moved = _moved_bytes(model, workload.micro_batch, kind, is_wide=run.is_wide)
    device = 3 * workload.micro_batch * model.flops / rate + memory_seconds(cluster.device, constants, moved)
    host = 3 * model.kernels * constants.launch_us * 1e-6
    each = max(device, host)
    exposed, hidden = _gradients(model, layout.data, each * 2 / 3, cluster, constants)
    times = workload.microbatches
    spread = times**0.5 * each * kind.spread * expected_most(layout.data)
    return StepParts(
        compute=times * device,
        tensor_wait=0.0,
        launch_wait=times * max(0.0, host - device),
        bubble=0.0,
        exposed=exposed,
        hidden=hidden,
        contention=constants.contention * hidden,
        slowest=spread,
        optimizer=memory_seconds(cluster.device, constants, model.params * _OPTIMIZER_BYTES),
    )


def _moved_bytes(model: SampleModel, samples: float, kind: _SampleKind, *, is_wide: bool) -> float:
    """Of a microbatch. Mixed precision keeps losses, norms and copies of sentences in fp32, half of the traffic."""
    width = 4.0 if is_wide else 2.0 if kind.convolves else 3.0
    passes = kind.passes * (_PLANAR if model.kind == "planar" and not is_wide else 1.0)
    moved = passes * samples * model.activations
    if model.kind == "recurrent":
        moved += 3 * model.samples_each * model.flops / 2
    return width * moved


def _gradients(
    model: SampleModel, ranks: int, backward: float, cluster: Cluster, constants: Constants
) -> tuple[float, float]:
    if ranks == 1:
        return 0.0, 0.0
    alone = collective_seconds("all_reduce", model.params * 4 / _BUCKETS, group_of(cluster, ranks), cluster)
    each = (alone + CALL_S) * constants.slowdown
    return reduce_behind(_BUCKETS, backward / _BUCKETS, each)
