"""Where two runs part: the first module whose output differs, or else whose gradient does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.verify.case import Case
from paceline.verify.measure import Bound, Tensors, movement, worst
from paceline.verify.settings import Settings
from paceline.verify.values import Calls, Gradients, StepValues

_MAGNIFIED = (
    "its gradient cancels, up to the rounding of its sums, and an optimizer that divides by the size of gradients "
    "magnifies that\n  a bias before a norm is such a parameter: drop it, or give the optimizer a larger eps"
)
_UNSTEADY = "the run was repeated to find the place, and then agreed: its results differ from run to run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where a rank differs. ``what`` is forward, gradient, norm, update, buffer or loss."""

    step: int
    module: str
    what: str
    error: float
    hint: str

    def __str__(self) -> str:
        where = f"step {self.step}, {self.what} of {self.module or 'the model'}: off by {self.error:.3g}"
        return f"{where}\n  {self.hint}" if self.hint else where


def locate(
    case: Case, settings: Settings, bound: Bound, expected: StepValues, per_rank: Sequence[StepValues]
) -> Divergence:
    """Names the first place where a rank differs in ``settings.record_step``, whose activations were recorded."""
    step = settings.record_step
    assert step is not None
    hint = _hint(case.make_model(), settings)
    for what, name, error in _errors(settings, bound, expected, per_rank):
        if not error <= bound.tolerance:
            module, _, tensor = name.rpartition(".")
            if what == "update" and _cancels(expected.gradients.get(name)):
                hint = _MAGNIFIED
            what = f"{what} ({tensor})" if what in ("gradient", "update", "buffer") else what
            return Divergence(
                step=step, module=name if what == "forward" else module, what=what, error=error, hint=hint
            )
    return Divergence(step=step, module="", what="repeating it, nothing", error=0.0, hint=_UNSTEADY)


def _errors(
    settings: Settings, bound: Bound, expected: StepValues, per_rank: Sequence[StepValues]
) -> Iterator[tuple[str, str, float]]:
    """Goes through all that was compared, in the order in which a step computes it: what, name, error."""
    activations = [values.activations for values in per_rank]
    for name, error in _forward_errors(bound, expected.activations, activations, settings.accumulate):
        yield "forward", name, error
    gradients = _largest(bound, per_rank, expected, lambda values: _unclipped(values, settings.clip))
    for name in _backward_order(expected):
        yield "gradient", name, gradients[name]
    yield "norm", "", _largest(bound, per_rank, expected, lambda values: {"": values.norm})[""]
    moved = movement(expected)
    for name, error in _largest(bound, per_rank, expected, lambda values: values.parameters, moved).items():
        yield "update", name, error
    for name, tensor in expected.buffers.items():
        errors = [worst(bound.measure(values.buffers, {name: tensor}, {})) for values in per_rank]
        yield "buffer", name, max(errors)
    yield "loss", "", _largest(bound, per_rank, expected, lambda values: {"": values.loss})[""]


def _largest(
    bound: Bound,
    per_rank: Sequence[StepValues],
    expected: StepValues,
    tensors: Callable[[StepValues], Tensors],
    scale: Tensors | None = None,
) -> dict[str, float]:
    """Returns the largest error of each tensor over the ranks."""
    wanted = tensors(expected)
    found = [bound.measure(tensors(values), wanted, scale or {}) for values in per_rank]
    return {name: worst({str(rank): errors[name] for rank, errors in enumerate(found)}) for name in wanted}


def _unclipped(values: StepValues, clip: float | None) -> Gradients:
    """Returns the gradients before they were clipped: clipping spreads one that is wrong over all of them."""
    factor = 1.0 if clip is None else min(1.0, clip / (float(values.norm) + 1e-6))  # torch's own formula
    return {name: None if gradient is None else gradient / factor for name, gradient in values.gradients.items()}


def _forward_errors(
    bound: Bound, expected: dict[int, Calls], per_rank: Sequence[dict[int, Calls]], accumulate: int
) -> list[tuple[str, float]]:
    """Returns how far each call's output is from the reference's, where the pieces of all ranks can be put together.

    Microbatch m of rank r is piece m * ranks + r of the batch, so the k-th output of a module is the concatenation of
    its k-th outputs in all pieces, in that order; likewise for the pieces of the reference. A piece may have made no
    such call (a branch that its samples did not take); an output without samples along dim 0 (a table of positions)
    cannot be put together and is left out.
    """
    errors = []
    theirs = [_numbered(expected[number]) for number in sorted(expected)]
    pieces = [_numbered(calls[m]) for m in range(accumulate) for calls in per_rank if m in calls]
    for call in dict.fromkeys(call for piece in theirs for call in piece):
        whole, ours = _joined(theirs, call), _joined(pieces, call)
        if whole is not None and ours is not None and ours.shape == whole.shape:
            errors.append((call[0], worst(bound.measure({"": ours}, {"": whole}, {}))))
    return errors


def _joined(pieces: Sequence[dict[tuple[str, int], torch.Tensor]], call: tuple[str, int]) -> torch.Tensor | None:
    """Returns the outputs of a call in all pieces, one after another; None where they do not fit together."""
    outputs = [piece[call] for piece in pieces if call in piece]
    if not outputs or any(not output.ndim or output.shape[1:] != outputs[0].shape[1:] for output in outputs):
        return None
    return torch.cat(outputs)


def _numbered(calls: Calls) -> dict[tuple[str, int], torch.Tensor]:
    """Returns outputs by module and how many calls of it came before."""
    outputs: dict[tuple[str, int], torch.Tensor] = {}
    seen: Counter[str] = Counter()
    for name, output in calls:
        outputs[name, seen[name]] = output
        seen[name] += 1
    return outputs


def _backward_order(expected: StepValues) -> list[str]:
    """Returns parameter names, those of the modules called last first: the order in which gradients arise."""
    called = {name: index for calls in expected.activations.values() for index, (name, _) in enumerate(calls)}
    return sorted(expected.gradients, key=lambda name: -called.get(name.rpartition(".")[0], -1))


def _cancels(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient of float64 is nothing but rounding."""
    return gradient is not None and gradient.numel() > 0 and float(gradient.abs().max()) < 1e-13


def _hint(model: nn.Module, settings: Settings) -> str:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms and not settings.layout.sync_batchnorm:
        return (
            "the model has BatchNorm, which normalises over the samples of one rank: its results depend on how the "
            "batch is cut\n  synchronise it over the ranks (sync_batchnorm), or use GroupNorm or LayerNorm"
        )
    return ""
