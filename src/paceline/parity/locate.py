"""Where two runs part: the first module whose output differs, or else whose gradient does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.parity.case import Case
from paceline.parity.runs import Settings, StepValues, run_distributed, run_reference

Activations = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where the distributed run differs. ``what`` is forward, gradient, norm, loss or update."""

    step: int
    module: str
    what: str
    error: float
    hint: str

    def __str__(self) -> str:
        where = f"step {self.step}, {self.what} of {self.module or 'the model'}: off by {self.error:.3g}"
        return f"{where}\n  {self.hint}" if self.hint else where


def locate(case: Case, settings: Settings, run: Callable[..., list[Any]], *, tolerance: float) -> Divergence:
    """Repeats both runs with the activations of ``settings.record_step`` and names the first module that differs."""
    step = settings.record_step
    assert step is not None
    expected = run_reference(case, settings)[step]
    per_rank: list[StepValues] = [values[step] for values in run(run_distributed, case, settings)]
    hint = _hint(case.make_model())
    for name, error in _forward_errors(expected.activations, [v.activations for v in per_rank], settings.accumulate):
        if not error <= tolerance:
            return Divergence(step=step, module=name, what="forward", error=error, hint=hint)
    for name in _backward_order(expected):
        error = max(difference(values.gradients[name], expected.gradients[name]) for values in per_rank)
        if not error <= tolerance:
            module, _, parameter = name.rpartition(".")
            return Divergence(step=step, module=module, what=f"gradient ({parameter})", error=error, hint=hint)
    error = max(difference(values.norm, expected.norm) for values in per_rank)
    if not error <= tolerance:
        return Divergence(step=step, module="", what="norm", error=error, hint=hint)
    for name, value in expected.parameters.items():
        error = max(difference(values.parameters[name], value) for values in per_rank)
        if not error <= tolerance:
            return Divergence(step=step, module=name.rpartition(".")[0], what="update", error=error, hint=hint)
    error = max(difference(values.loss, expected.loss) for values in per_rank)
    return Divergence(step=step, module="", what="loss", error=error, hint=hint)


def difference(ours: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Returns the largest absolute difference; infinite if only one exists, or if they differ in being finite."""
    if ours is None or expected is None:
        return 0.0 if ours is expected else float("inf")
    if ours.shape != expected.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    value = float((ours.double() - expected.double()).abs().max())
    same = torch.equal(torch.nan_to_num(ours, nan=1.5e300), torch.nan_to_num(expected, nan=1.5e300))
    return (0.0 if same else float("inf")) if value != value else value


def _forward_errors(expected: Activations, per_rank: list[Activations], accumulate: int) -> list[tuple[str, float]]:
    """Returns how far each call's output is from the reference's, where the pieces of all ranks can be put together.

    Microbatch m of rank r is piece m * ranks + r of the batch, so call k of the reference is the concatenation of the
    k-th calls of all pieces in that order. A rank without samples in a microbatch has no calls for it.
    """
    errors = []
    pieces = _pieces(per_rank, len(expected), accumulate)
    for index, (name, whole) in enumerate(expected):
        outputs = [piece[index][1] for piece in pieces if index < len(piece) and piece[index][0] == name]
        if not outputs or outputs[0].ndim == 0 or any(o.shape[1:] != whole.shape[1:] for o in outputs):
            continue
        errors.append((name, difference(torch.cat(outputs), whole)))
    return errors


def _pieces(per_rank: list[Activations], num_calls: int, accumulate: int) -> list[Activations]:
    by_rank = [[calls[i : i + num_calls] for i in range(0, len(calls), num_calls)] for calls in per_rank]
    return [pieces[m] for m in range(accumulate) for pieces in by_rank if m < len(pieces)]


def _backward_order(expected: StepValues) -> list[str]:
    """Returns parameter names, those of the modules called last first: the order in which gradients arise."""
    called = {name: index for index, (name, _) in enumerate(expected.activations)}
    return sorted(expected.gradients, key=lambda name: -called.get(name.rpartition(".")[0], -1))


def _hint(model: nn.Module) -> str:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return (
            "the model has BatchNorm, which normalises over the samples of one rank and microbatch: its results depend "
            "on how the batch is cut\n  use GroupNorm or LayerNorm, or evaluate with that in mind"
        )
    return ""
