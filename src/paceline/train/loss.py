"""Losses as a sum and a count, so that ragged batches weigh exactly as in one process.

A mean over a microbatch hides how much it stands for: averaged over ranks and microbatches of different sizes, it
gives other gradients than one process would compute. A loss here returns the *sum* over its elements (samples or
tokens) and how many there were; the step divides by the count over all ranks and microbatches.

Images of bytes are normalised here, since a byte is a quarter of what a float is to read, to pin and to copy: one pass
on the device makes (x - mean) / std of them, in the dtype of the run. A model that is compiled whole does it itself
(``leave_to``): the pass is then part of the first kernel that reads the images.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.data.datasets import DataShape
from paceline.engines.blocks import Compiled
from paceline.engines.tensor.layers import SplitLogits
from paceline.errors import DataError, UsageError
from paceline.imports import import_from_path
from paceline.models.attention import current_part
from paceline.models.hugging_face import is_causal, with_head_loss
from paceline.models.registry import loss_vocabulary
from paceline.plan.layout import LARGE_VOCABULARY, Layout

IGNORED = -100  # targets with this value do not count, as in torch's cross entropy
Criterion: TypeAlias = Callable[[Any, Any], Any]
_IMAGE_DIMS = 4  # samples, channels, height, width
_HALF = (torch.bfloat16, torch.float16)


class Normalise:
    """Makes (x - mean) / std of a batch's images of bytes: uint8 tensors of samples, channels, height and width."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # As x * scale + shift, which one operator computes in a pass that reads bytes.
        self._scale = [1.0 / each for each in std]
        self._shift = [-middle / each for middle, each in zip(mean, std, strict=True)]
        self._known: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Any, dtype: torch.dtype) -> Any:
        """Returns the batch with its images in ``dtype``, in the memory format that they had."""

        def change(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != _IMAGE_DIMS:
                return value
            self.check(value)
            scale, shift = self.factors(value.device, dtype)
            return torch.addcmul(shift, value, scale)

        return tree_map(change, batch)

    def check(self, images: torch.Tensor) -> None:
        """Raises DataError for images of other channels than there are numbers."""
        if len(self._scale) not in (1, images.shape[1]):
            what = f"images of {images.shape[1]} channels, and {len(self._scale)} numbers in shape.mean of the data"
            fix = "images are (channels, height, width): check their order, and shape.mean and shape.std"
            raise DataError(f"{what}\n  there is one for each channel, or one for all\n  {fix}")

    def factors(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scale and shift by channel on a device; made there once, as a copy would wait for it."""
        key = device, dtype
        if key not in self._known:
            made = [torch.tensor(each, dtype=dtype, device=device) for each in (self._scale, self._shift)]
            self._known[key] = made[0].view(1, -1, 1, 1), made[1].view(1, -1, 1, 1)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class LossValue:
    """A summed loss and how many elements it sums; ``correct`` counts right answers where that means something.

    ``answers`` are what ``correct`` compares with the targets, where they are known one by one.
    """

    total: torch.Tensor
    count: torch.Tensor | float
    correct: torch.Tensor | None = None
    answers: torch.Tensor | None = None


class Loss(Protocol):
    """Runs a model on a batch and returns the summed loss; ``score`` is for evaluation, with ``correct``."""

    @property
    def elements_per_sample(self) -> float | None:
        """Elements that each sample contributes; None: it depends on the sample, so ranks must exchange counts."""

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue: ...

    def score(self, model: Callable[..., Any], batch: Any) -> LossValue: ...


class CrossEntropy:
    """Cross entropy of classes (B, C) or tokens (B, T, V), whose logits may be split by vocabulary over ranks."""

    def __init__(self, elements_per_sample: float | None, *, compiles: bool = False, is_fused: bool = False) -> None:
        """Takes one for classes, the context for tokens, None where targets may be ignored.

        With ``compiles`` one kernel reads the logits: no copy of them in float32 is made, or kept for backward. Where
        it ``is_fused``, the model computes the loss itself, and nobody has the logits of all tokens.
        """
        self.elements_per_sample = elements_per_sample
        self.is_fused = is_fused
        self.sum: Callable[..., torch.Tensor] = Compiled(_summed, "the loss") if compiles else _summed

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        inputs, targets = batch
        if self.is_fused:
            return LossValue(model(inputs, targets=targets), self._count(targets))
        return LossValue(self._total(logits_of(model(inputs)), targets), self._count(targets))

    def score(self, model: Callable[..., Any], batch: Any) -> LossValue:
        inputs, targets = batch
        if self.is_fused:
            total, correct = model(inputs, targets=targets, counts=True)
            return LossValue(total, self._count(targets), correct)
        logits = logits_of(model(inputs))
        answers = logits.argmax(-1)
        correct = (answers == targets).sum()
        return LossValue(self._total(logits, targets), self._count(targets), correct, answers)

    def _count(self, targets: torch.Tensor) -> torch.Tensor | float:
        return (targets != IGNORED).sum() if self.elements_per_sample is None else float(targets.numel())

    def _total(self, logits: torch.Tensor | SplitLogits, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(logits, SplitLogits):
            return logits.cross_entropy(targets, IGNORED)
        return self.sum(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def logits_of(output: Any) -> Any:
    """Returns the logits of what a model gave: itself, or a part of it, as Hugging Face's models return."""
    return output if isinstance(output, torch.Tensor | SplitLogits) else getattr(output, "logits", output)


def _summed(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if rows.dtype in _HALF:  # a module of bf16 parameters gives those; sums and exponentials need more digits
        rows = rows.float()
    return F.cross_entropy(rows, targets, reduction="sum", ignore_index=IGNORED)


class CustomLoss:
    """A user's ``function(model, batch) -> (sum, count)``."""

    elements_per_sample = None

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self._name = name

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        """Calls the function and checks what it returned."""
        value = self._function(model, batch)
        if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], torch.Tensor):
            what = f"train.loss = {self._name} returned {type(value).__name__}"
            rule = "a loss returns (sum over its elements, their number): a mean would weigh ragged batches wrongly"
            raise UsageError(f"{what}\n  {rule}\n  return loss.sum(), count")
        total, count = value
        if total.numel() != 1:
            raise UsageError(f"train.loss = {self._name} returned a sum of shape {list(total.shape)}, not one number")
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            return LossValue(total.reshape(()), count.detach().reshape(()))
        if not isinstance(count, int | float):
            what = f"shape {list(count.shape)}" if isinstance(count, torch.Tensor) else f"type {type(count).__name__}"
            raise UsageError(f"train.loss = {self._name} returned a count of {what}, not one number")
        return LossValue(total.reshape(()), float(count))

    score = __call__


class OnNormalised:
    """A loss whose batches have their images of bytes normalised first, or by the model that trains on them."""

    def __init__(self, loss: Loss, normalise: Normalise, dtype: torch.dtype) -> None:
        self.elements_per_sample = loss.elements_per_sample
        self.sum = getattr(loss, "sum", None)  # what sums the loss of rows, where that is compiled apart
        self._loss = loss
        self._normalise = normalise
        self._dtype = dtype
        self._is_inside = False  # the model
        self._last: tuple[Any, Any] | None = None

    def leave_to(self, model: nn.Module, device: torch.device, param_dtype: torch.dtype | None) -> None:
        """Has a model that will be compiled whole normalise images; ``param_dtype``: what engines cast inputs to."""
        forward, normalise = model.forward, self._normalise
        (scale, shift), dtype = normalise.factors(device, self._dtype), param_dtype or self._dtype

        def normalised_forward(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8 and inputs.ndim == _IMAGE_DIMS:
                normalise.check(inputs)
                inputs = torch.addcmul(shift, inputs, scale).to(dtype)
            return forward(inputs, *args, **kwargs)

        model.forward = normalised_forward
        self._is_inside = True

    def prepare(self, batch: Any) -> Any:
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._normalise(batch, self._dtype)
        return self._last[1]

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        return self._loss(model, batch if self._is_inside else self._normalise(batch, self._dtype))

    def score(self, model: Callable[..., Any], batch: Any) -> LossValue:
        return self._loss.score(model, self.prepare(batch))


def fuses_loss(kind: str, layout: Layout, model: nn.Module, device: str) -> bool:
    """Decides ``fused_loss``: whether the model computes its loss together with its output layer.

    Ask before it is parallelized: one of Hugging Face is changed in place. Raises UsageError where it has none.
    """
    if kind != "auto" or not layout.fuses_loss(LARGE_VOCABULARY, device):
        return False
    is_asked = layout.fused_loss is True
    vocabulary = loss_vocabulary(model)
    if vocabulary is None and is_causal(model):
        try:
            vocabulary = loss_vocabulary(with_head_loss(model))
        except UsageError as error:
            if is_asked:
                raise
            warnings.warn(f"the loss is not fused with the output layer: {error.headline}", stacklevel=2)
    if vocabulary is None and is_asked:
        raise UsageError(
            f"train.fused_loss = true, but {type(model).__name__} does not compute a loss\n"
            "  the loss is fused with the output layer inside the model, which says so with loss_vocabulary()\n"
            "  give it that method and a forward that takes targets (see docs/fused-loss.md), or leave "
            "train.fused_loss out"
        )
    return vocabulary is not None and layout.fuses_loss(vocabulary, device)


def build_loss(
    kind: str,
    shape: DataShape,
    *,
    may_ignore: bool = False,
    compiles: bool = False,
    is_fused: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Loss:
    """Makes the loss that ``train.loss`` names. ``may_ignore``: it counts in each step; ``dtype``: of images."""
    if kind != "auto":
        loss: Loss = CustomLoss(import_from_path(kind, "train.loss"), kind)
    else:
        elements: dict[str, float | None] = {"classes": 1.0, "tokens": shape.context and float(shape.context)}
        known = None if may_ignore else elements.get(shape.kind)
        loss = CrossEntropy(known, compiles=compiles and not is_fused, is_fused=is_fused)
    if shape.mean is None or shape.std is None:
        return loss
    return OnNormalised(loss, Normalise(shape.mean, shape.std), dtype)


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
    """``function(outputs, targets)`` as a loss: a mean over samples, or their sum. ``mean``: of the last batch.

    With ``in_full`` the function gets fp32 in the place of halves; with ``may_count`` it may return (sum, count).
    """

    elements_per_sample = None

    def __init__(
        self, function: Criterion, name: str = "criterion", *, in_full: bool = False, may_count: bool = False
    ) -> None:
        self.mean: torch.Tensor | None = None
        self._function, self._name = function, name
        self._in_full, self._may_count = in_full, may_count
        self._is_sum = _reduction_of(function) == "sum"

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        """Runs model and function. Raises UsageError for a loss that is not one number."""
        inputs, targets = batch
        outputs = model(inputs)
        value = self._function(tree_map(_full, outputs) if self._in_full else outputs, targets)
        is_pair = self._may_count and isinstance(value, tuple) and len(value) == 2
        loss, count = value if is_pair else (value, self._weight(batch))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            fix = "return loss.mean()" + (", or (sum, count)" if self._may_count else "")
            raise UsageError(f"{self._name} returned {what}\n  a loss is one number\n  {fix}")
        loss = _full(loss.reshape(()))  # it will be added up with others
        is_total = is_pair or self._is_sum
        self.mean = loss.detach() / count if is_total else loss.detach()
        return LossValue(loss if is_total else loss * count, count)

    score = __call__

    def _weight(self, batch: Any) -> float:
        """Returns what a mean over a batch counts: its samples; its tokens, where a rank has a part of each sample."""
        if current_part() is None:
            return float(count_samples(batch))
        first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        return float(first.shape[:2].numel())


def _reduction_of(criterion: Any) -> str:
    """Says how a criterion reduces: by its attribute, by a functools.partial's argument, or as a mean."""
    keywords = getattr(criterion, "keywords", None) or {}
    reduction = getattr(criterion, "reduction", None) or keywords.get("reduction") or "mean"
    if reduction == "none":
        rule = "a loss is one number, of which the trainer knows the weight"
        raise UsageError(f"criterion has reduction = 'none'\n  {rule}\n  use reduction='mean' or 'sum'")
    return str(reduction)


def _full(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value
