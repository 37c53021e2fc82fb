"""A linear layer whose weight gradient is computed by a node of its own, recorded before the product's.

Autograd runs first what was recorded last: between the two nodes others may run, such as one that starts a message. See
[Note: overlap] in ``tensor.py``. The factors wait in memory from one node to the other: the layer's input, which is
there anyway, and the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def may_split_backward() -> bool:
    """Whether nobody else watches for ``F.linear``: a schedule that computes weight gradients later does by itself."""
    return torch._C._len_torch_function_stack() == 0


class LateWeight(NamedTuple):
    """A weight with a node of its own. Nobody else holds it: the node would keep itself alive."""

    matrix: Tensor
    gradient: _LateGradient
    is_cast: bool

    @staticmethod
    def record(matrix: Tensor) -> LateWeight:
        """Records the node. Under autocast the product reads a copy of lower precision, as torch's own would."""
        kind = matrix.device.type
        is_cast = (
            torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and matrix.dtype != torch.float64
        )
        if is_cast:
            matrix = matrix.to(torch.get_autocast_dtype(kind))
        gradient = _LateGradient()
        record: Callable[..., Tensor] = _ComputeLate.apply
        return LateWeight(record(matrix, gradient), gradient, is_cast)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns what ``F.linear`` would."""
        if self.is_cast:
            x, bias = x.to(self.matrix.dtype), None if bias is None else bias.to(self.matrix.dtype)
        product: Callable[..., Tensor] = _LateProduct.apply
        return product(x, self.matrix, bias, self.gradient)


class _LateGradient:
    """What a product's node leaves for the node that computes its weight's gradient."""

    def __init__(self) -> None:
        self._left: list[tuple[int, Tensor, Tensor]] = []

    def leave(self, x: Tensor, gradient: Tensor) -> None:
        """Keeps the factors of the gradient for this pass of backward."""
        self._left.append((torch._C._current_graph_task_id(), x, gradient))

    def compute(self) -> Tensor:
        """Returns the gradient. What a pass left that asked for no weight gradients is dropped."""
        task = torch._C._current_graph_task_id()
        left, self._left = self._left, []
        terms = [_rows(gradient).t() @ _rows(x) for each, x, gradient in left if each == task]
        return sum(terms[1:], terms[0])


class _ComputeLate(torch.autograd.Function):
    """The weight itself; backward computes its gradient, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, late: _LateGradient) -> Tensor:
        ctx.late = late
        return matrix.view_as(matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        del gradient
        return ctx.late.compute(), None


class _LateProduct(torch.autograd.Function):
    """A linear layer; backward gives the gradients of input and bias, and leaves that of the weight for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, late: _LateGradient) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.late = late
        return F.linear(x, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        ctx.late.leave(x, gradient)
        nothing = gradient.new_zeros(()).expand_as(matrix)  # takes no memory; autograd wants the shape
        bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ matrix if ctx.needs_input_grad[0] else None, nothing, bias, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
