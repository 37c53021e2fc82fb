"""Nodes of autograd: two functions as one node, and a linear layer whose weight gradient is computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

Change = Callable[[Tensor], Tensor]


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
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, leave: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
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


def late_linear(x: Tensor, matrix: Tensor, bias: Tensor | None, leave: Callable[[Tensor, Tensor], None]) -> Tensor:
    """Returns what ``F.linear`` would; of the weight's gradient, backward leaves the factors ``x`` and the output's."""
    run: Callable[..., Tensor] = _LateLinear.apply
    return run(x, matrix, bias, leave)


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of a linear layer's weight from its factors."""
    return _rows(gradient).t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
