"""What a loss gives an engine: a sum over elements, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from paceline.errors import UsageError


class LossSum(Protocol):
    """What a loss returns: a sum over elements, and how many there are."""

    @property
    def total(self) -> Tensor: ...

    @property
    def count(self) -> Tensor | float: ...


@dataclass(frozen=True, slots=True)
class DetachedLoss:
    """A summed loss and its count, without the graph that computed them."""

    total: Tensor
    count: Tensor | float


def differentiable_sum(value: Any) -> LossSum:
    """Returns a loss, or a plain pair, as sum and count. Raises UsageError for others, and where there is no graph."""
    if not hasattr(value, "total"):
        if not isinstance(value, tuple) or len(value) != 2:
            raise UsageError(
                f"a loss returned a {type(value).__name__}\n"
                "  loss(model, microbatch) gives a sum over elements, and how many there are\n"
                "  return (loss_sum, count)"
            )
        value = DetachedLoss(value[0], value[1])
    total = value.total
    if not isinstance(total, Tensor) or not total.requires_grad:
        what = "a tensor that requires no gradient" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise UsageError(
            f"the loss is {what}\n"
            "  a step differentiates it: it must be computed from the model's output by torch's operations alone\n"
            "  leave out .detach(), .item(), argmax, numpy and torch.no_grad() on the way from the model to the loss"
        )
    return cast("LossSum", value)
