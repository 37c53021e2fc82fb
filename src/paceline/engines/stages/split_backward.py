"""Backward in two parts: first what the stage before waits for, later what only the optimizer needs.

    input part    the gradient of a stage's inputs: half of the work, and all that anybody waits for
    weight part   the gradients of the weights of its linear layers, x^T g: whenever there is nothing better to do

A linear layer under ``DeferredWeights`` leaves its weight's gradient out and notes the two factors, which a stage keeps
from the input part to the weight part. The gradients of all other parameters are cheap and fall out of the input part.
The weight part hands all gradients to autograd at once, as one backward over the parameters: an engine's hooks see each
microbatch's gradients together, as they would without the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.engines.nodes import late_linear, weight_gradient


@dataclass(slots=True)
class WeightPart:
    """What one forward leaves for the weight part of its backward."""

    factors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # weight, x, g
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def multiply(self) -> None:
        for weight, x, gradient in self.factors:
            self._add(weight, weight_gradient(x, gradient).to(weight.dtype))
        self.factors.clear()

    def give(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Gives parameters their gradients; returns if there were any."""
        receivers = set(parameters)
        found = [(each, self.gradients.pop(each)) for each in list(self.gradients) if each in receivers]
        if found:
            torch.autograd.backward([parameter for parameter, _ in found], [gradient for _, gradient in found])
        return bool(found)

    def keep(self, parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
        """Keeps gradients that the input part has computed besides."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._add(parameter, gradient)

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        held = self.gradients.get(parameter)
        self.gradients[parameter] = gradient if held is None else held + gradient


class DeferredWeights(TorchFunctionMode):
    """Under it, linear layers leave the gradients of their weights to ``part``."""

    def __init__(self, part: WeightPart) -> None:
        super().__init__()
        self._part = part

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and torch.is_grad_enabled():
            x, weight, bias = _Arguments(*args, **kwargs)
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                return self._linear(x, weight, bias)
        return function(*args, **kwargs)

    def _linear(self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None) -> torch.Tensor:
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        factors = self._part.factors
        return late_linear(x, weight.detach().to(x.dtype), bias, lambda x, g: factors.append((weight, x, g)))


def input_part(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    part: WeightPart,
) -> list[torch.Tensor | None]:
    """Runs the input part of a backward: returns the gradients of ``inputs``, and leaves the rest to ``part``.

    A checkpointed part runs again in there, so linear layers are deferred again: ``torch.autograd.grad`` would not.
    """
    wanted = (*inputs, *parameters)
    run: Callable[..., tuple[torch.Tensor | None, ...]] = torch.autograd.Variable._execution_engine.run_backward
    with DeferredWeights(part):
        found = run(tuple(roots), tuple(gradients), False, False, wanted, allow_unreachable=True, accumulate_grad=False)
    part.keep(parameters, found[len(inputs) :])
    return list(found[: len(inputs)])


class _Arguments(NamedTuple):
    """The arguments of ``F.linear``, by its own names."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
