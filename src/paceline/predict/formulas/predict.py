"""A prediction: step time and memory of a workload on a cluster.

What a data-parallel step takes for models known by what a sample costs: convolutional, recurrent, translation.

step = max(device, host) for each microbatch + gradients that nothing hides + the slowest of N ranks' spread

device   3 x FLOPs / (ceiling x share of the kind) + bytes / bandwidth
share    convolutions have rates of their own, on 16-bit tensor units and else; other kinds part of matrix products'
bytes    passes x activations; a recurrence reads its weights again for each token of a sentence
spread   sigma E[max of N normal deviates]: batches of sentences differ in length from rank to rank

What the rows cover that constants were fitted on, and in what a workload lies outside of it, in words.

For each generation of devices, class of frameworks and kind of model, ``calibrated_domain.yaml`` holds the precisions
of those rows and the least and most of their sizes; ``bench/fit_constants.py`` writes it beside the constants. A size
is outside where it is less than half of the least or more than twice the most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from paceline.bounded_yaml import load_shipped
from paceline.cluster.devices import Cluster
from paceline.cluster.kernels import ceiling, memory_seconds
from paceline.cluster.nccl import collective_seconds, group_of
from paceline.plan.workload import ModelShape, SampleModel, Workload
from paceline.predict.formulas.block import CALL_S
from paceline.predict.formulas.constants import Constants, ConstantSets, between, constants_for, fitted_constants
from paceline.predict.formulas.step import StepParts, expected_most, reduce_behind, transformer_step
from paceline.predict.memory.footprint import Footprint, footprint

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


MARGIN = 2.0
# What a size is called in a sentence, and in what unit.
SIZES = {
    "width": "a width of {}",
    "length": "sequences of {} tokens",
    "tokens": "{} tokens in a microbatch",
    "samples": "{} samples in a microbatch",
}
_ALIKE = {"bf16": {"bf16", "fp16"}, "fp16": {"bf16", "fp16"}}  # the same units, at the same rate
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The precisions of some rows, and the least and most of each size."""

    precisions: tuple[str, ...]
    sizes: Mapping[str, tuple[float, float]]


def kind_of(workload: Workload) -> str:
    """Returns what kind of model a workload is of, in the words of the file."""
    model = workload.model
    if isinstance(model, SampleModel):
        return model.kind
    return "mixture of experts" if model.experts else "transformer" if model.causal else "encoder"


def sizes_of(workload: Workload) -> dict[str, float]:
    """Returns the sizes by which a workload is compared to those rows."""
    model = workload.model
    if isinstance(model, SampleModel):
        return {"samples": workload.micro_batch}
    return {"width": float(model.hidden), "length": float(workload.run.seq_len), "tokens": workload.tokens}


def outside_of(workload: Workload, cluster: Cluster, *, is_fitted: bool) -> tuple[str, ...]:
    """Returns why a workload is outside the calibrated domain; nothing where it is inside."""
    generation, framework, kind = cluster.device.generation, workload.run.framework, kind_of(workload)
    where = f"{generation} devices under {framework} frameworks"
    if not is_fitted:
        return (f"no constants were fitted for {where}: they are composed of others",)
    found = calibrated_domain().get((generation, framework, kind))
    if found is None:
        return (f"no model of this kind ({kind}) is among the runs that the constants of {where} were fitted on",)
    reasons = []
    if not _ALIKE.get(workload.run.compute, {workload.run.compute}) & set(found.precisions):
        reasons.append(f"{workload.run.compute}, where those runs are in {' and '.join(found.precisions)}")
    for name, value in sizes_of(workload).items():
        low, high = found.sizes[name]
        if not low / MARGIN <= value <= high * MARGIN:
            reasons.append(
                f"{SIZES[name].format(_short(value))}, where those runs have {_short(low)} to {_short(high)}"
            )
    return tuple(reasons)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def parse_domain(text: str) -> dict[Key, Domain]:
    """Reads what ``format_domain`` writes."""
    return {
        (generation, framework, kind): Domain(
            precisions=tuple(values["precisions"]),
            sizes={name: (float(pair[0]), float(pair[1])) for name, pair in values.items() if name != "precisions"},
        )
        for generation, frameworks in (load_shipped(text) or {}).items()
        for framework, kinds in frameworks.items()
        for kind, values in kinds.items()
    }


@cache
def calibrated_domain() -> Mapping[Key, Domain]:
    """Returns the domain of the constants that are shipped."""
    return parse_domain(resources.files("paceline.predict.formulas").joinpath("calibrated_domain.yaml").read_text())


# Errors that nine of ten rows of the split dev stay below, inside the calibrated domain (without the table whose very
# blocks were measured) and outside.
FITTED_P90 = 0.15
COMPOSED_P90 = 0.29


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step takes and needs. ``outside``: why it lies outside the calibrated domain."""

    workload: Workload
    step: StepParts
    memory: Footprint
    fits: bool
    outside: tuple[str, ...] = ()

    @property
    def fitted(self) -> bool:
        """Whether it lies inside that domain, with constants fitted for this generation and framework."""
        return not self.outside

    @property
    def seconds(self) -> float:
        return self.step.total

    @property
    def band(self) -> tuple[float, float]:
        """Seconds between which nine of ten published runs of this kind would be: see docs/prediction.md."""
        error = FITTED_P90 if self.fitted else COMPOSED_P90
        return self.seconds * (1 - error), self.seconds * (1 + error)

    @property
    def samples_per_s(self) -> float:
        return self.workload.micro_batch * self.workload.microbatches * self.workload.layout.data / self.seconds


def predict(workload: Workload, cluster: Cluster, sets: ConstantSets | None = None) -> Prediction:
    """Predicts a step of a workload on a cluster."""
    sets = fitted_constants() if sets is None else sets
    constants, fitted = _constants(workload, cluster, sets)
    price = sample_step if isinstance(workload.model, SampleModel) else transformer_step
    memory = footprint(workload)
    return Prediction(
        workload=workload,
        step=price(workload, cluster, constants),
        memory=memory,
        fits=memory.total <= cluster.device.memory_bytes,
        outside=outside_of(workload, cluster, is_fitted=fitted),
    )


def _constants(workload: Workload, cluster: Cluster, sets: ConstantSets) -> tuple[Constants, bool]:
    """Returns the set for a workload. Tensor-parallel layers of torch break a compiled block into pieces."""
    generation, framework = cluster.device.generation, workload.run.framework
    if framework == "compiled" and workload.layout.tensor > 1:
        return between(sets, generation, "compiled", "eager"), (generation, "compiled") in sets
    return constants_for(sets, generation, framework)


def model_flops(workload: Workload) -> float:
    """Of one sequence (or sample), forward and backward, attention in full."""
    model, length = workload.model, workload.run.seq_len
    if isinstance(model, SampleModel):
        return 3 * model.flops
    return transformer_flops(model, length)


def transformer_flops(model: ModelShape, length: int) -> float:
    """Of one sequence of a transformer, forward and backward, attention in full."""
    return length * (6 * model.active_matmul_params + 12 * model.layers * model.score_width * length)
