"""Batches and criterions as a plain training script has them: (inputs, targets), and a function of outputs and targets.

A criterion is told nothing of ranks or microbatches. Whether its number is a mean or a sum is read from its
``reduction``, so that the trainer knows how it weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

from paceline.engines.engine import Engine
from paceline.errors import UsageError
from paceline.train.loss import LossValue

Criterion: TypeAlias = Callable[[Any, Any], torch.Tensor]


def place_batch(batch: Any, device: torch.device) -> tuple[int, Any]:
    """Returns how many samples a batch has, and the batch on the device. Leaves dtypes as they are."""
    if batch is None:
        return 0, None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise UsageError(f"batch is a {what}\n  a batch is (inputs, targets)\n  pass (batch[...], batch[...])")
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tensors or tensors[0].ndim == 0:
        what = "no tensor" if not tensors else "a first tensor without dims"
        raise UsageError(f"batch has {what}\n  its first dim counts the samples\n  pass (inputs, targets) as tensors")

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    return tensors[0].shape[0], tree_map(move, batch)


def reduction_of(criterion: Any) -> str:
    """Says how a criterion reduces: by its attribute, by a functools.partial's argument, or as a mean."""
    keywords = getattr(criterion, "keywords", None) or {}
    reduction = getattr(criterion, "reduction", None) or keywords.get("reduction") or "mean"
    if reduction == "none":
        raise UsageError(
            "criterion has reduction = 'none'\n  a loss is one number, of which the trainer knows the weight\n"
            "  use reduction='mean' or 'sum'"
        )
    return str(reduction)


def criterion_loss(engine: Engine, batch: Any, criterion: Criterion) -> torch.Tensor:
    """Runs model and criterion; the criterion gets fp32 where the module's parameters are less."""
    inputs, targets = batch
    with engine.precision.context(engine.comm.device):
        outputs = engine(inputs)
        if engine.precision.param_dtype is not None:
            outputs = tree_map(_in_full, outputs)
        return criterion(outputs, targets)


class CriterionLoss:
    """A user's criterion as the loss that a replay takes."""

    elements_per_sample = None

    def __init__(self, engine: Engine, criterion: Criterion) -> None:
        self._engine = engine
        self._criterion = criterion

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        del model
        return LossValue(criterion_loss(self._engine, batch, self._criterion), 1.0)

    def score(self, model: Callable[..., Any], batch: Any) -> LossValue:
        return self(model, batch)


def _in_full(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
