"""How far two runs are apart, and how far they may be.

In float64 the measure is the largest *absolute* difference: sums in another order differ by 1e-15, a mistake by 1e-10.

In mixed precision it is *relative*: the norm of the difference of two tensors over the norm of the expected one, since
a single element may take the other side of the edge between two half-precision numbers. A tensor whose gradient nearly
cancels is nothing but rounding, so no norm counts for less than a share, the *floor*, of that of all tensors.
Parameters are measured by how far the step moved them. A model of float64 that computes parts in float32 has a *noise*,
how far two runs of one process are apart, which sets the bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from paceline.verify.case import Settings
from paceline.verify.runs import Reference, StepValues

TOLERANCE = 1e-10

Tensors = Mapping[str, torch.Tensor | None]
Measure = Callable[[Tensors, Tensors, Tensors], dict[str, float]]
"""Takes what was computed, what was expected and what it is measured by; returns the error of each name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    loss: float = 0.0
    gradients: float = 0.0
    norm: float = 0.0
    parameters: float = 0.0
    buffers: float = 0.0

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.norm, self.parameters, self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far two runs may be apart, and why; with a ``floor`` differences are relative, without one absolute."""

    tolerance: float
    reason: str
    floor: float | None = None

    @property
    def is_relative(self) -> bool:
        return self.floor is not None

    def measure(self, ours: Tensors, expected: Tensors, scale: Tensors) -> dict[str, float]:
        """Returns the error of each expected tensor, in terms of ``scale`` where it has one of that name."""
        return absolute(ours, expected, scale) if self.floor is None else relative(ours, expected, scale, self.floor)


def bound_for(settings: Settings, pieces: int) -> Bound:
    """Returns the bound for a run that is compared with one process on batches of ``pieces``.

    Let u be half the distance of two half-precision numbers: 2^-8 of their size in bf16, 2^-11 in fp16. A gradient of a
    piece of the batch is rounded once to half precision and added up in float32. With the same pieces both runs round
    the same numbers, and differ by the float32 sums (1e-7 each) and by the few elements that another order of sums
    pushes over an edge; if one in 256 takes the other side, that is u / 16. Gradients that travel in half precision are
    off by 0.4 u, shares weighed wrongly by tens of u.

    With other pieces, and where an expert takes the rows of several ranks at once, the two runs round different
    numbers: u for each side, and as much again where pieces partly cancel. An element at an edge may also switch a
    ReLU, which is much for a small tensor; so there the floor is the norm of all.

    In fp8 u is 2^-4 of a number's size (e4m3). The bound for the same pieces is the same share of this u. Elsewhere it
    is u: casts round alike whatever lies beside, and what differs is rounded to bf16 before.
    """
    tolerance, policy = settings.tolerance, settings.policy
    if settings.is_exact:
        return Bound(tolerance=tolerance or TOLERANCE, reason="sums in another order, in float64")
    half = torch.float8_e4m3fn if policy.float8 is not None else policy.autocast_dtype or policy.param_dtype
    assert half is not None
    name, unit = str(half).removeprefix("torch."), torch.finfo(half).eps / 2
    if pieces == settings.accumulate * settings.ranks and settings.layout.expert == 1:
        reason = f"the same roundings to {name} on both sides, and one element in 256 on the other side of an edge"
        return Bound(tolerance=tolerance or unit / 16, reason=reason, floor=0.01)
    reason = f"gradients of other pieces of the batch, rounded to {name} on both sides"
    return Bound(tolerance=tolerance or unit * (4 if policy.float8 is None else 1), reason=reason, floor=1.0)


def noise_bound(settings: Settings, whole: Reference, pieces: Reference) -> Bound | None:
    """Returns the bound for a model that computes parts more coarsely than float64; None where it has no such parts.

    ``whole`` are batches as one process takes them, ``pieces`` those of the ranks, which round the same numbers as the
    ranks; as in mixed precision, one element in 256 may be on the other side of an edge. Gradients that travel in
    float32 are off by more. A difference of more than 2^10 roundings is none: results depend on how the batch is cut.
    """
    unit = whole.coarse.unit
    if not unit:
        return None
    floor = 0.01 if pieces.pieces == settings.accumulate * settings.data_ranks else 1.0
    found = compare(whole.steps[0], pieces.steps[0], partial(relative, floor=floor))
    noise = max(found.loss, found.gradients, found.norm)
    if noise > 2**10 * unit:
        return None
    parts = f"parts of the model compute in {whole.coarse.dtype} ({', '.join(whole.coarse.names)})"
    reason = f"{parts}: one process differs from itself by {noise:.2g} where its batch is cut otherwise"
    return Bound(tolerance=max(noise, unit) * (1 / 16 if floor < 1 else 4), reason=reason, floor=floor)


def compare(ours: StepValues, expected: StepValues, measure: Measure | None = None) -> Errors:
    measure = measure or absolute
    return Errors(
        loss=worst(measure({"": ours.loss}, {"": expected.loss}, {})),
        gradients=worst(measure(ours.gradients, expected.gradients, {})),
        norm=worst(measure({"": ours.norm}, {"": expected.norm}, {})),
        parameters=worst(measure(ours.parameters, expected.parameters, movement(expected))),
        buffers=max((worst(measure(ours.buffers, {n: b}, {})) for n, b in expected.buffers.items()), default=0.0),
    )


def errors_by_step(reference: Reference, per_rank: Iterable[list[StepValues]], measure: Measure) -> list[Errors]:
    expected = enumerate(reference.steps)
    return [merge(compare(values[step], each, measure) for values in per_rank) for step, each in expected]


def worst(errors: Mapping[str, float]) -> float:
    return max(errors.values(), default=0.0)


def merge(errors: Iterable[Errors]) -> Errors:
    found = [dataclasses.asdict(each) for each in (Errors(), *errors)]
    return Errors(**{name: max(each[name] for each in found) for name in found[0]})


def movement(expected: StepValues) -> dict[str, torch.Tensor]:
    start = expected.start
    return {name: value - start[name] for name, value in expected.parameters.items() if name in start}


def absolute(ours: Tensors, expected: Tensors, _: Tensors) -> dict[str, float]:
    return {name: difference(ours.get(name), tensor) for name, tensor in expected.items()}


def relative(ours: Tensors, expected: Tensors, scale: Tensors, floor: float) -> dict[str, float]:
    """Returns tensors' differences over the norm of ``scale`` (else expected), at least ``floor`` times that of all."""
    sizes = {name: _norm(scale.get(name, tensor)) for name, tensor in expected.items()}
    least = floor * math.hypot(*sizes.values())
    errors = absolute(ours, expected, scale)
    for name, tensor in expected.items():
        found, size = ours.get(name), max(sizes[name], least)
        if found is not None and tensor is not None and 0.0 < errors[name] < math.inf:
            errors[name] = _norm(found.double() - tensor.double()) / size if size else math.inf
    return errors


def difference(ours: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Returns the largest absolute difference; infinite if only one exists, or if they differ in being finite."""
    if ours is None or expected is None:
        return 0.0 if ours is expected else math.inf
    if ours.shape != expected.shape:
        return math.inf
    if not ours.numel():
        return 0.0
    value = float((ours.double() - expected.double()).abs().max())
    if not math.isnan(value):
        return value
    same = torch.equal(torch.nan_to_num(ours, nan=1.5e300), torch.nan_to_num(expected, nan=1.5e300))
    return 0.0 if same else math.inf


def _norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().norm())
