"""What was fitted on published runs: constants, blocks that such runs measured, and the domain that they cover.

    fitted_constants.yaml     one set for each generation of devices and class of frameworks
    measured_blocks.csv       blocks of one shape: what they took over what the formulas say
    calibrated_domain.yaml    precisions and sizes, from the least to the most, by kind of model besides

``bench/fit_constants.py`` writes these files from rows of the split ``calib`` alone. A set that no such row reaches is
composed: the device's rates are the mean of the same generation's under other frameworks (else of the nearest
generation's), what the framework adds is that of the same framework on the newest generation that has it. Where eager
runs alone tell of a device, its products are as much faster under another framework as they are elsewhere.

Formulas are smooth, libraries are not: for another shape they take another kernel, and a block may take a tenth more or
less than its neighbours would tell. Where rows ran a block of just this shape, the formulas' times of the block and of
the head are multiplied by what those rows say:

    factors    least squares of log(predicted / measured) over the rows of a shape, pulled to 1 as by one row more that
               says 1: so one row moves its shape half of the way, and twenty nearly all of it
    head       told apart from the blocks only by rows of several depths; else 1

A composed set knows no blocks.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

from paceline.bounded_yaml import load_shipped
from paceline.cluster.devices import Cluster
from paceline.cluster.kernels import KernelRates
from paceline.plan.workload import Framework, Workload

GENERATIONS = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "cpu")
FRAMEWORKS: tuple[Framework, ...] = ("eager", "compiled", "megatron")
# All that one rank's block depends on, beside the device's generation and the framework; how each is read from a file.
SHAPE_COLUMNS: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(("hidden", "ffn", "tensor", "seq_len"), int),
    "samples": float,
    **dict.fromkeys(("compute", "recompute"), str),
    "fused_attention": "True".__eq__,
}
BlockShape: TypeAlias = tuple[object, ...]  # values of SHAPE_COLUMNS


class Factors(NamedTuple):
    block: float = 1.0
    head: float = 1.0


MeasuredBlocks: TypeAlias = Mapping[BlockShape, Factors]


class Domain(NamedTuple):
    """The precisions of some rows, and the least and most of each size."""

    precisions: tuple[str, ...]
    sizes: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants(KernelRates):
    """What a step depends on beside the catalog's figures. Rates are shares of them.

    ``matmul``, ``k_half``, ``attention``, ``attention_half``: kernels (cluster/kernels.py). ``traffic``: bytes that
    memory-bound work moves, over the count of a framework that fuses as its class does. ``launch_us``: the host's time
    for each kernel. ``contention``: seconds of compute lost for each second of communication that runs beside it.
    ``slowdown``: what communication takes in training over what it takes alone. ``convolution``, ``convolution_wide``:
    what convolutions reach of the ceiling, on 16-bit tensor units and else (models known by what a sample costs).
    ``rows``: how many measurements the set was fitted on.
    """

    traffic: float = 1.0
    launch_us: float = 10.0
    contention: float = 0.15
    slowdown: float = 1.15
    eight_bit: float = 0.8
    convolution: float = 0.45
    convolution_wide: float = 0.35
    rows: int = 1
    blocks: MeasuredBlocks = field(default_factory=dict)
    domain: Mapping[str, Domain] = field(default_factory=dict)  # by kind of model


CONSTANT_NAMES = tuple(
    each.name for each in fields(Constants) if each.name not in ("memory", "blocks", "domain", "rows")
)
DEVICE_FIELDS = ("matmul", "k_half", "attention", "attention_half", "eight_bit", "convolution", "convolution_wide")
FRAMEWORK_FIELDS = ("traffic", "launch_us", "slowdown", "contention")
# cuDNN's attention, which Megatron uses from Hopper on. No calib row reaches it: chosen by hand on dev rows.
CUDNN_ATTENTION = 0.45
_MOST_MATMUL = 0.98  # of the ceiling: that of the fit
ConstantSets: TypeAlias = Mapping[tuple[str, str], Constants]


def constants_for(sets: ConstantSets, generation: str, framework: str) -> tuple[Constants, bool]:
    """Returns the set of a generation and framework, and whether it was fitted; else one composed of others."""
    found = sets.get((generation, framework))
    if found is not None:
        return found, True
    near = _nearest(sets, generation)
    # What many rows say weighs more, by the root of their number, as it does in the fit.
    device = replace(
        mean_of(near, DEVICE_FIELDS, weights=[math.sqrt(each.rows) for each in near]), blocks={}, domain={}
    )
    if near == [each for key, each in sets.items() if key[1] == "eager" and each in near]:
        # As much faster as they are than those of eager code on the newest generation that has both.
        both = [each for each in GENERATIONS if {(each, framework), (each, "eager")} <= sets.keys()]
        over = sets[both[-1], framework].matmul / sets[both[-1], "eager"].matmul if both else 1.0
        device = replace(device, matmul=min(_MOST_MATMUL, device.matmul * over))
    same = [sets[each, framework] for each in GENERATIONS if (each, framework) in sets]
    composed = replace(device, **{name: getattr(same[-1], name) for name in FRAMEWORK_FIELDS} if same else {})
    if framework == "megatron" and generation in ("hopper", "blackwell"):
        composed = replace(composed, attention=CUDNN_ATTENTION)
    return composed, False


def between(sets: ConstantSets, generation: str, first: str, second: str) -> Constants:
    """Returns what lies between two frameworks: for runs that are partly one and partly the other."""
    both = [constants_for(sets, generation, framework)[0] for framework in (first, second)]
    return replace(mean_of(both, (*DEVICE_FIELDS, "traffic", "launch_us")), blocks={})


def _nearest(sets: ConstantSets, generation: str) -> list[Constants]:
    """The sets of the nearest generation that has any; of two as near, the newer one's."""
    own = GENERATIONS.index(generation) if generation in GENERATIONS else len(GENERATIONS) - 2
    order = sorted(GENERATIONS, key=lambda each: (abs(GENERATIONS.index(each) - own), -GENERATIONS.index(each)))
    for each in order:
        if found := [sets[each, framework] for framework in FRAMEWORKS if (each, framework) in sets]:
            return found
    return [Constants()]


def mean_of(
    sets: Sequence[Constants],
    names: Sequence[str],
    base: Constants | None = None,
    weights: Sequence[float] | None = None,
) -> Constants:
    """Returns geometric means, as these are rates; what is not named is that of ``base``, else of the last set."""
    shares = [1.0] * len(sets) if weights is None else weights
    means = {
        name: math.prod(getattr(each, name) ** (share / sum(shares)) for each, share in zip(sets, shares, strict=True))
        for name in names
    }
    return replace(sets[-1] if base is None else base, **means)


@cache
def fitted_constants() -> ConstantSets:
    blocks = parse_blocks(_shipped("measured_blocks.csv"))
    values, domain = (load_shipped(_shipped(name)) for name in ("fitted_constants.yaml", "calibrated_domain.yaml"))
    sets = read_constants(values, domain)
    return {key: replace(each, blocks=blocks.get(key, {})) for key, each in sets.items()}


def _shipped(name: str) -> str:
    return resources.files("paceline.predict.formulas").joinpath(name).read_text()


def read_constants(constants: Mapping[str, Any], domain: Mapping[str, Any]) -> ConstantSets:
    """Reads sets without blocks: what ``fitted_constants.yaml`` holds, and ``calibrated_domain.yaml``."""
    found = {}
    for generation, frameworks in constants.items():
        for framework, values in frameworks.items():
            known: dict[str, Any] = {name: float(values[name]) for name in CONSTANT_NAMES if name in values}
            covered = {kind: _domain(each) for kind, each in domain.get(generation, {}).get(framework, {}).items()}
            found[generation, framework] = Constants(**known, rows=int(values.get("rows", 1)), domain=covered)
    return found


def _domain(values: Mapping[str, Any]) -> Domain:
    sizes = {name: (float(pair[0]), float(pair[1])) for name, pair in values.items() if name != "precisions"}
    return Domain(precisions=tuple(values["precisions"]), sizes=sizes)


def shape_of(workload: Workload) -> BlockShape | None:
    """Returns the shape of a workload's blocks; None where blocks alone do not make the model, or experts are in it."""
    model, layout, run = workload.model, workload.layout, workload.run
    if model.is_sampled or model.experts or layout.context_ranks > 1:
        return None
    sizes = (model.width, model.mlp_width, layout.tensor, run.seq_len, workload.micro_batch)
    return (*sizes, run.compute, workload.recompute, run.fused_attention)


def parse_blocks(text: str) -> dict[tuple[str, str], dict[BlockShape, Factors]]:
    found: dict[tuple[str, str], dict[BlockShape, Factors]] = defaultdict(dict)
    for line in csv.DictReader(each for each in text.splitlines() if not each.startswith("#")):
        shape = tuple(read(line[name]) for name, read in SHAPE_COLUMNS.items())
        found[line["generation"], line["framework"]][shape] = Factors(float(line["block"]), float(line["head"]))
    return dict(found)


# The calibrated domain: a size is outside where it is less than half of the least or more than twice the most.

MARGIN = 2.0
# What a size is called in a sentence, and in what unit.
SIZES = {
    "width": "a width of {}",
    "length": "sequences of {} tokens",
    "tokens": "{} tokens in a microbatch",
    "samples": "{} samples in a microbatch",
}
_ALIKE = {"bf16": {"bf16", "fp16"}, "fp16": {"bf16", "fp16"}}  # the same units, at the same rate


def kind_of(workload: Workload) -> str:
    model = workload.model
    if model.is_sampled:
        return model.kind
    return "mixture of experts" if model.experts else "transformer" if model.causal else "encoder"


def sizes_of(workload: Workload) -> dict[str, float]:
    if workload.model.is_sampled:
        return {"samples": workload.micro_batch}
    return {"width": float(workload.model.width), "length": float(workload.run.seq_len), "tokens": workload.tokens}


def outside_of(workload: Workload, cluster: Cluster, sets: ConstantSets) -> tuple[str, ...]:
    """Returns why a workload lies outside of what the constants were fitted on, in words; nothing where it does not."""
    generation, framework, kind = cluster.device.generation, workload.run.framework, kind_of(workload)
    where = f"{generation} devices under {framework} frameworks"
    if (generation, framework) not in sets:
        return (f"no constants were fitted for {where}: they are composed of others",)
    found = sets[generation, framework].domain.get(kind)
    if found is None:
        return (f"no model of this kind ({kind}) is among the runs that the constants of {where} were fitted on",)
    reasons = []
    if not _ALIKE.get(workload.run.compute, {workload.run.compute}) & set(found.precisions):
        reasons.append(f"{workload.run.compute}, where those runs are in {' and '.join(found.precisions)}")
    for name, value in sizes_of(workload).items():
        low, high = found.sizes[name]
        if not low / MARGIN <= value <= high * MARGIN:
            own, least, most = (f"{each:,.0f}" if each >= 10 else f"{each:.3g}" for each in (value, low, high))
            reasons.append(f"{SIZES[name].format(own)}, where those runs have {least} to {most}")
    return tuple(reasons)
