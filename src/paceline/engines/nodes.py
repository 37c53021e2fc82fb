"""Nodes of autograd: two functions as one, linear layers whose weight gradient comes later, backward in two parts.

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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.overrides import TorchFunctionMode

Change = Callable[[Tensor], Tensor]
Tensors = Sequence[Tensor]
Leave = Callable[[Tensor, Tensor], None]  # takes the factors of a weight gradient


def moved(x: Tensor, forward: Change, backward: Change) -> Tensor:
    """Returns ``forward(x)``, which autograd does not see; what comes back is ``backward(gradient)``."""
    run: Callable[..., Tensor] = _Moved.apply
    return run(x, forward, backward)


def same(x: Tensor) -> Tensor:
    """Returns the tensor, as a view: a node may not return its own input."""
    return x.view_as(x)


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Change, backward: Change) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient), None, None


class _LateLinear(Function):
    """A linear layer; backward gives the gradients of input and bias, and calls ``leave`` with the weight's factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, leave: Leave) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.leave = leave
        return F.linear(x, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        ctx.leave(x, gradient)
        # Where a node stands before the matrix, it must run: this takes no memory, and autograd wants the shape.
        nothing = gradient.new_zeros(()).expand_as(matrix) if ctx.needs_input_grad[1] else None
        bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ matrix if ctx.needs_input_grad[0] else None, nothing, bias, None


def late_linear(x: Tensor, matrix: Tensor, bias: Tensor | None, leave: Leave) -> Tensor:
    """Returns what ``F.linear`` would; of the weight's gradient, backward leaves the factors ``x`` and the output's."""
    run: Callable[..., Tensor] = _LateLinear.apply
    return run(x, matrix, bias, leave)


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of a linear layer's weight from its factors."""
    return _rows(gradient).t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(slots=True)
class WeightPart:
    """What one forward leaves for the weight part of its backward."""

    factors: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # weight, x, g
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def multiply(self) -> None:
        for weight, x, gradient in self.factors:
            self.add(weight, weight_gradient(x, gradient).to(weight.dtype))
        self.factors.clear()

    def give(self, parameters: Iterable[Tensor]) -> bool:
        """Gives parameters their gradients; returns if there were any."""
        receivers = set(parameters)
        found = [(each, self.gradients.pop(each)) for each in list(self.gradients) if each in receivers]
        if found:
            torch.autograd.backward([parameter for parameter, _ in found], [gradient for _, gradient in found])
        return bool(found)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
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
        is_linear = function is F.linear and torch.is_grad_enabled()
        return (self._linear if is_linear else function)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # as torch's
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return F.linear(input, weight, bias)
        x, kind = input, input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        factors = self._part.factors
        return late_linear(x, weight.detach().to(x.dtype), bias, lambda x, g: factors.append((weight, x, g)))


def input_part(
    roots: Tensors, gradients: Sequence[Tensor | None], inputs: Tensors, parameters: Tensors, part: WeightPart
) -> list[Tensor | None]:
    """Runs the input part of a backward: returns the gradients of ``inputs``, and leaves the rest to ``part``.

    A checkpointed part runs again in there, so linear layers are deferred again: ``torch.autograd.grad`` would not.
    """
    wanted = (*inputs, *parameters)
    run: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.Variable._execution_engine.run_backward
    with DeferredWeights(part):
        found = run(tuple(roots), tuple(gradients), False, False, wanted, allow_unreachable=True, accumulate_grad=False)
    for parameter, gradient in zip(parameters, found[len(inputs) :], strict=True):
        if gradient is not None:
            part.add(parameter, gradient)
    return list(found[: len(inputs)])
