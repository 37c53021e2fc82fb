"""A loss as a plain training script has it: a function of outputs and targets, for batches of (inputs, targets).

The function is told nothing of ranks or microbatches. Whether its number is a mean or a sum is read from its
``reduction``, so that the step of ``train/step.py`` knows how it weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

from paceline.errors import UsageError
from paceline.train.loss import LossValue

Criterion: TypeAlias = Callable[[Any, Any], Any]


def count_samples(batch: Any) -> int:
    """Returns how many samples a batch has. Raises UsageError unless it is (inputs, targets), or None for none."""
    if batch is None:
        return 0
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise UsageError(f"batch is a {what}\n  a batch is (inputs, targets)\n  pass (batch[...], batch[...])")
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tensors or tensors[0].ndim == 0:
        what = "no tensor" if not tensors else "a first tensor without dims"
        raise UsageError(f"batch has {what}\n  its first dim counts the samples\n  pass (inputs, targets) as tensors")
    return tensors[0].shape[0]


class OutputLoss:
    """``function(outputs, targets)`` as a loss of ``train/loss.py``: a mean over samples, or their sum.

    ``mean`` is the mean of the last batch, detached. With ``in_full`` the function gets fp32 in the place of halves.
    With ``may_count`` it may return (sum, count), where elements weigh otherwise.
    """

    elements_per_sample = None

    def __init__(
        self, function: Criterion, name: str = "criterion", *, in_full: bool = False, may_count: bool = False
    ) -> None:
        self.mean: torch.Tensor | None = None
        self._function = function
        self._name = name
        self._in_full = in_full
        self._may_count = may_count
        self._is_sum = _reduction_of(function) == "sum"

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        """Runs model and function. Raises UsageError for a loss that is not one number."""
        inputs, targets = batch
        outputs = model(inputs)
        value = self._function(tree_map(_full, outputs) if self._in_full else outputs, targets)
        is_pair = self._may_count and isinstance(value, tuple) and len(value) == 2
        loss, count = value if is_pair else (value, float(count_samples(batch)))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            fix = "return loss.mean()" + (", or (sum, count)" if self._may_count else "")
            raise UsageError(f"{self._name} returned {what}\n  a loss is one number\n  {fix}")
        loss = _full(loss.reshape(()))  # it will be added up with others
        is_total = is_pair or self._is_sum
        self.mean = loss.detach() / count if is_total else loss.detach()
        return LossValue(loss if is_total else loss * count, count)

    score = __call__


def _reduction_of(criterion: Any) -> str:
    """Says how a criterion reduces: by its attribute, by a functools.partial's argument, or as a mean."""
    keywords = getattr(criterion, "keywords", None) or {}
    reduction = getattr(criterion, "reduction", None) or keywords.get("reduction") or "mean"
    if reduction == "none":
        raise UsageError(
            "criterion has reduction = 'none'\n  a loss is one number, of which the trainer knows the weight\n"
            "  use reduction='mean' or 'sum'"
        )
    return str(reduction)


def _full(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
