"""What samples may hold (finite numbers, tokens and classes that the model has), and what a model needs of its data.

A check costs one pass over values that have just been read: a sum of floats, the smallest and the largest of integers.
``RowDataset`` knows the file and line of its samples, and may go on without them; samples of the user's own code have
a number (``CheckedSamples``). The folder of a Hugging Face model says how its data are made (``config/hf_folder.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paceline.config import Config
from paceline.config.data_sections import IMAGE_SIZE, OnBad
from paceline.config.hf_folder import PREPROCESSOR, ImageSettings, image_size, read_class_names, read_image_settings
from paceline.config.sections import HFModelConfig
from paceline.data.datasets import IGNORED, MEAN, STD, Batch, DataShape, MapDataset
from paceline.data.tokenizers import Tokenizer, has_tokenizer, open_tokenizer
from paceline.errors import BadSampleError, DataError

_RULE = "  numbers are finite; tokens and classes are whole numbers from 0, and targets that do not count are -100"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """What a batch may hold. None: not known. ``has_classes``: targets are classes or tokens, as for cross entropy."""

    vocab_size: int | None = None  # of inputs
    classes: int | None = None
    has_classes: bool = True
    has_features: bool = False  # inputs are floats


class CheckedSamples:
    """Samples of the user's own code. ``fetch_batch`` looks at them in the first epoch, and where they evaluate."""

    def __init__(self, dataset: MapDataset, rules: SampleRules, name: str) -> None:
        self.dataset, self.rules, self.name = dataset, rules, name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def check_own(batch: Batch, rules: SampleRules, name: str, numbers: list[int]) -> None:
    """Raises ``BadSampleError`` with the number of the first sample of the user's own that is wrong."""
    for row, reason in find_bad(batch, rules).items():
        sample = f"sample {numbers[row]}" if row < len(numbers) else "a sample"
        rule = "mend it in the data set; where targets are something else, name a loss of your own: train.loss"
        raise BadSampleError(f"{name}: {sample} cannot be used: {reason}\n{_RULE}\n  {rule}")


def refuse_sample(what: str, rule: str, on_bad: OnBad, cause: Exception | None = None) -> None:
    """Raises ``BadSampleError``, or warns that the run goes on without the sample where ``on_bad`` says so."""
    if on_bad == "stop":
        raise BadSampleError(f"{what}\n  {rule}, or go on without such ones: data.on_bad = skip") from cause
    warnings.warn(f"{what}; it does not count", stacklevel=4)


def check_classes(count: int, where: str) -> None:
    """Raises ``DataError`` for data of a single class: a model that knows nothing has the loss 0 on them."""
    if count < 2:
        rule = "a model tells at least two classes apart: with one, every loss is 0"
        raise DataError(f"{where} has {count} class\n  {rule}\n  check the path, or bring samples of the other classes")


def find_bad(batch: Batch, rules: SampleRules, names: tuple[str, str] = ("inputs", "targets")) -> dict[int, str]:
    """Returns the rows of a batch that no run may train on, with the reason; of what is no pair, those with NaN."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(x, torch.Tensor) for x in batch)
    found: dict[int, str] = {}
    if not is_pair:
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim and bool(leaf.sum().isnan()):
                found |= _named(leaf, leaf.isnan(), "a value", "")
        return found
    inputs, targets = batch
    reasons = [_not_finite(inputs, names[0]), _not_finite(targets, names[1])]
    if rules.vocab_size is not None:
        reasons.append(_outside(inputs, rules.vocab_size, names[0], "tokens"))
    if rules.has_classes and targets.is_floating_point():
        fractions = targets != targets.round()
        wrong = fractions if bool(fractions.any()) else torch.ones_like(targets, dtype=torch.bool)
        rule = f" of type {targets.dtype}, and a class is of an integer type"
        reasons.append(_named(targets, wrong, repr(names[1]), rule))
    elif rules.has_classes:
        noun = "classes" if rules.vocab_size is None else "tokens"
        reasons.append(_outside(targets, rules.classes, names[1], noun, but=IGNORED))
    for each in reversed(reasons):  # of a row with several, the first is reported
        found |= each
    return dict(sorted(found.items()))


def _not_finite(values: torch.Tensor, name: str) -> dict[int, str]:
    if not values.is_floating_point() or not values.ndim or bool(values.sum().isfinite()):
        return {}
    return _named(values, ~values.isfinite(), repr(name), "")


def _outside(values: torch.Tensor, limit: int | None, name: str, noun: str, but: int | None = None) -> dict[int, str]:
    """Finds integers that are negative or not below ``limit``, other than ``but``."""
    if values.is_floating_point() or values.dtype == torch.bool or not values.numel() or not values.ndim:
        return {}
    least, most = (int(each) for each in values.long().aminmax())
    if least >= 0 and (limit is None or most < limit):
        return {}
    wrong = values < 0 if limit is None else (values < 0) | (values >= limit)
    wrong = wrong if but is None else wrong & (values != but)
    count = f"there are {limit} {noun}, from 0" if limit is not None else f"{noun} count from 0"
    return _named(values, wrong, repr(name), f", and {count}")


def _named(values: torch.Tensor, wrong: torch.Tensor, name: str, rule: str) -> dict[int, str]:
    """Returns each row that has something wrong, with its first value that is."""
    found = {}
    for row in wrong.reshape(len(wrong), -1).any(1).nonzero().flatten().tolist():
        place = tuple(wrong[row].nonzero()[0].tolist())
        found[row] = f"{name}{''.join(f'[{each}]' for each in place)} is {values[row][place].item():g}{rule}"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What a config says of the samples that its model reads. ``folder``: of a Hugging Face model. None: nothing."""

    folder: Path | None = None
    is_pretrained: bool = False  # with the folder's weights
    keeps_head: bool = False  # with its classes too
    vocab_size: int | None = None
    classes: int | None = None
    has_features: bool = False
    has_own_loss: bool = False

    def rules(self, shape: DataShape) -> SampleRules:
        has_tokens = shape.kind == "tokens" or (shape.kind == "custom" and self.vocab_size is not None)
        vocab_size = (shape.vocab_size or self.vocab_size) if has_tokens else None
        classes = vocab_size if has_tokens else shape.classes or self.classes
        kinds = {"has_classes": not self.has_own_loss, "has_features": self.has_features}
        return SampleRules(vocab_size=vocab_size, classes=classes, **kinds)

    def tokenizer(self) -> Tokenizer | None:
        return open_tokenizer(self.folder) if self.folder is not None and has_tokenizer(self.folder) else None

    def images(self, asked: int | None) -> ImageSettings:
        """Returns how images are made; ``asked`` is the config's size. Warns where ImageNet's colours are taken."""
        size, settings = None, None
        if self.folder is not None:
            size, settings = image_size(self.folder), read_image_settings(self.folder)
        if settings is None and self.is_pretrained:
            about = f"{self.folder} has no {PREPROCESSOR}: images get the mean and the deviation of ImageNet"
            warnings.warn(about, stacklevel=2)
        settings = settings or ImageSettings(size=None, mean=MEAN, std=STD)
        return replace(settings, size=asked or size or IMAGE_SIZE)

    def labels(self, names: Sequence[str], what: str) -> tuple[tuple[str, ...], list[int]]:
        """Returns the names of the model's classes, and its number for each of the data's; a new head has theirs."""
        known = read_class_names(self.folder) if self.folder is not None and self.keeps_head else None
        if known is None:
            return tuple(names), list(range(len(names)))
        missing = [name for name in names if name not in known]
        if missing:
            text = f"{what} are {', '.join(names)}, and {missing[0]!r} is no class of the model in {self.folder}"
            rule = f"a pretrained head knows its own classes: {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}"
            fix = "name them as the model does, or name the head in model.fresh, such as [classifier], to begin it anew"
            raise DataError(f"{text}\n  {rule}\n  {fix}")
        return known, [known.index(name) for name in names]


NO_NEEDS = ModelNeeds()


def needs_of(config: Config) -> ModelNeeds:
    model = config.model
    named = {"vocab_size": "vocab_size", "classes": "num_classes"}
    sizes: dict[str, Any] = {name: getattr(model, own, None) for name, own in named.items()}
    has_features, has_own_loss = model.kind in ("mlp", "resnet"), config.train.loss != "auto"
    known = ModelNeeds(**sizes, has_features=has_features, has_own_loss=has_own_loss)
    if not isinstance(model, HFModelConfig):
        return known
    keeps_head = model.pretrained and not model.fresh
    return replace(known, folder=Path(model.path), is_pretrained=model.pretrained, keeps_head=keeps_head)
