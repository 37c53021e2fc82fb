"""A linear layer whose weight gradient is computed by a node of its own, recorded before the product's.

Autograd runs first what was recorded last: between the two nodes others may run, such as one that starts a message. See
[Note: overlap] in ``layers.py``. The factors wait in memory from one node to the other: the layer's input, which is
there anyway, and the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.engines.nodes import late_linear, moved, same, weight_gradient

Product = Callable[[Tensor, Tensor | None], Tensor]  # of an input, with a bias: what ``F.linear`` would return


def may_split_backward() -> bool:
    """Whether nobody else watches for ``F.linear``: a schedule that computes weight gradients later does by itself."""
    return torch._C._len_torch_function_stack() == 0


def record_late(matrix: Tensor) -> Product:
    """Records the node of a weight's gradient; returns the product with that weight, which is called once.

    Under autocast the product reads a copy of lower precision, as torch's own would.
    """
    kind = matrix.device.type
    is_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    is_cast = is_autocast and matrix.dtype != torch.float64
    left: list[tuple[int, Tensor, Tensor]] = []  # the factors, with the pass of backward that left them

    def leave(x: Tensor, gradient: Tensor) -> None:
        left.append((torch._C._current_graph_task_id(), x, gradient))

    def compute(_: Tensor) -> Tensor:
        """Returns the gradient, whatever comes in. What a pass left that asked for no weight gradients is dropped."""
        task = torch._C._current_graph_task_id()
        terms = [weight_gradient(x, gradient) for each, x, gradient in left if each == task]
        left.clear()
        return sum(terms[1:], terms[0])

    # Only the product holds this weight: a node that did would keep itself alive.
    weight = moved(matrix.to(torch.get_autocast_dtype(kind)) if is_cast else matrix, same, compute)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        if is_cast:
            x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
        return late_linear(x, weight, bias, leave)

    return product
