"""What the rows cover that constants were fitted on, and in what a workload lies outside of it, in words.

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
from paceline.plan.model_shape import SampleModel
from paceline.plan.workload import Workload

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
    return {"width": float(model.width), "length": float(workload.run.seq_len), "tokens": workload.tokens}


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
