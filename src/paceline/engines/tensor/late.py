"""A linear layer whose weight gradient is computed by a node of its own, recorded before the product's.

Autograd runs first what was recorded last: between the two nodes others may run, such as one that starts a message. See
[Note: overlap] in ``layers.py``. The factors wait in memory from one node to the other: the layer's input, which is
there anyway, and the gradient of its output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engines.nodes import late_linear, moved, same, weight_gradient


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
        return LateWeight(moved(matrix, same, gradient.compute), gradient, is_cast)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns what ``F.linear`` would."""
        if self.is_cast:
            x, bias = x.to(self.matrix.dtype), None if bias is None else bias.to(self.matrix.dtype)
        return late_linear(x, self.matrix, bias, self.gradient.leave)


class _LateGradient:
    """What a product's node leaves for the node that computes its weight's gradient."""

    def __init__(self) -> None:
        self._left: list[tuple[int, Tensor, Tensor]] = []

    def leave(self, x: Tensor, gradient: Tensor) -> None:
        """Keeps the factors of the gradient for this pass of backward."""
        self._left.append((torch._C._current_graph_task_id(), x, gradient))

    def compute(self, _: Tensor) -> Tensor:
        """Returns the gradient, whatever comes in. What a pass left that asked for no weight gradients is dropped."""
        task = torch._C._current_graph_task_id()
        left, self._left = self._left, []
        terms = [weight_gradient(x, gradient) for each, x, gradient in left if each == task]
        return sum(terms[1:], terms[0])
