"""The fitted constants: one set for each generation of devices and class of frameworks, in fitted_constants.yaml.

``bench/fit_constants.py`` writes that file from rows of the split ``calib`` alone. A set that no such row reaches is
composed: the device's rates are the mean of the same generation's under other frameworks (else of the nearest
generation's), what the framework adds is that of the same framework on the newest generation that has it. Beside its
constants a fitted set knows the blocks that its rows measured (``measured_blocks.py``); a composed one knows none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from paceline.bounded_yaml import load_shipped
from paceline.cluster.kernels import KernelRates
from paceline.plan.workload import Framework
from paceline.predict.formulas.measured_blocks import MeasuredBlocks, parse_blocks

GENERATIONS = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "cpu")
FRAMEWORKS: tuple[Framework, ...] = ("eager", "compiled", "megatron")


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


CONSTANT_NAMES = tuple(each.name for each in fields(Constants) if each.name not in ("memory", "blocks", "rows"))
DEVICE_FIELDS = ("matmul", "k_half", "attention", "attention_half", "eight_bit", "convolution", "convolution_wide")
FRAMEWORK_FIELDS = ("traffic", "launch_us", "slowdown", "contention")
# cuDNN's attention, which Megatron uses from Hopper on. No calib row reaches it: chosen by hand on dev rows.
CUDNN_ATTENTION = 0.40
ConstantSets = Mapping[tuple[str, str], Constants]


def constants_for(sets: ConstantSets, generation: str, framework: str) -> tuple[Constants, bool]:
    """Returns the set of a generation and framework, and whether it was fitted; else one composed of others."""
    found = sets.get((generation, framework))
    if found is not None:
        return found, True
    near = _nearest(sets, generation)
    # What many rows say weighs more, by the root of their number, as it does in the fit.
    device = replace(mean_of(near, DEVICE_FIELDS, weights=[math.sqrt(each.rows) for each in near]), blocks={})
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
    """Returns the sets that are shipped."""
    files = resources.files("paceline.predict.formulas")
    blocks = parse_blocks(files.joinpath("measured_blocks.csv").read_text())
    sets = parse_constants(files.joinpath("fitted_constants.yaml").read_text())
    return {key: replace(each, blocks=blocks.get(key, {})) for key, each in sets.items()}


def parse_constants(text: str) -> ConstantSets:
    """Reads sets from YAML: generation, then framework, then values."""
    found = {}
    for generation, frameworks in (load_shipped(text) or {}).items():
        for framework, values in frameworks.items():
            known: dict[str, Any] = {name: float(values[name]) for name in CONSTANT_NAMES if name in values}
            found[generation, framework] = Constants(**known, rows=int(values.get("rows", 1)))
    return found
