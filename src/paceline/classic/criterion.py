"""Batches and criterions as a plain training script has them: (inputs, targets), and a function of outputs and targets.

A criterion is told nothing of ranks or microbatches. Whether its number is a mean or a sum is read from its
``reduction``, so that the step of ``train/step.py`` knows how it weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

from paceline.engines.precision import Precision
from paceline.errors import UsageError
from paceline.train.loss import LossValue

Criterion: TypeAlias = Callable[[Any, Any], torch.Tensor]


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


class CriterionLoss:
    """A user's criterion as a loss of ``train/loss.py``: the sum over samples, and their number.

    ``mean`` is the mean loss of the last batch, detached. The criterion gets fp32 where parameters are less.
    """

    elements_per_sample = None

    def __init__(self, criterion: Criterion, precision: Precision) -> None:
        self.mean: torch.Tensor | None = None
        self._criterion = criterion
        self._precision = precision
        self._reduction = _reduction_of(criterion)

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        """Runs model and criterion. Raises UsageError for a loss that is not one number."""
        inputs, targets = batch
        outputs = model(inputs)
        if self._precision.param_dtype is not None:
            outputs = tree_map(_in_full, outputs)
        loss = self._criterion(outputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"criterion returned {what}\n  a loss is one number\n  return loss.mean()")
        loss, samples = loss.reshape(()), count_samples(batch)
        is_sum = self._reduction == "sum"
        self.mean = loss.detach() / samples if is_sum else loss.detach()
        return LossValue(loss if is_sum else loss * samples, float(samples))

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


def _in_full(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
