"""Where two runs part: the first module whose output differs, or else whose gradient does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.parity.case import Case
from paceline.parity.runs import Calls, Settings, StepValues, run_distributed, run_reference


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
    activations = [values.activations for values in per_rank]
    for name, error in _forward_errors(expected.activations[0], activations, settings.accumulate):
        if not error <= tolerance:
            return Divergence(step=step, module=name, what="forward", error=error, hint=hint)
    gradients = [_unclipped(values, settings.clip) for values in (expected, *per_rank)]
    for name in _backward_order(expected):
        error = max(difference(ours[name], gradients[0][name]) for ours in gradients[1:])
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


def _unclipped(values: StepValues, clip: float | None) -> dict[str, torch.Tensor | None]:
    """Returns the gradients before they were clipped: clipping spreads one that is wrong over all of them."""
    factor = 1.0 if clip is None else min(1.0, clip / (float(values.norm) + 1e-6))  # torch's own formula
    return {name: None if gradient is None else gradient / factor for name, gradient in values.gradients.items()}


def _forward_errors(expected: Calls, per_rank: list[dict[int, Calls]], accumulate: int) -> list[tuple[str, float]]:
    """Returns how far each call's output is from the reference's, where the pieces of all ranks can be put together.

    Microbatch m of rank r is piece m * ranks + r of the batch, so the k-th output of a module is the concatenation of
    its k-th outputs in all pieces, in that order. A piece may have made no such call (a branch that its samples did not
    take); an output without samples along dim 0 (a table of positions) cannot be put together and is left out.
    """
    errors = []
    pieces = [_numbered(calls[m]) for m in range(accumulate) for calls in per_rank if m in calls]
    for call, whole in _numbered(expected).items():
        outputs = [piece[call] for piece in pieces if call in piece]
        if not whole.ndim or any(not o.ndim or o.shape[1:] != whole.shape[1:] for o in outputs):
            continue
        if sum(map(len, outputs)) == len(whole):
            errors.append((call[0], difference(torch.cat(outputs), whole)))
    return errors


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
    called = {name: index for index, (name, _) in enumerate(expected.activations[0])}
    return sorted(expected.gradients, key=lambda name: -called.get(name.rpartition(".")[0], -1))


def _hint(model: nn.Module) -> str:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return (
            "the model has BatchNorm, which normalises over the samples of one rank and microbatch: its results depend "
            "on how the batch is cut\n  use GroupNorm or LayerNorm, or evaluate with that in mind"
        )
    return ""
