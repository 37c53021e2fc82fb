"""Looks at samples where they are first read: numbers that are finite, tokens and classes that the model has.

    floats     one sum over a batch; only where that is not finite, each number is looked at
    integers   the smallest and the largest of a batch

So a check costs one pass over values that have just been read. ``find_bad`` says which samples of a batch are wrong.
Who has read them knows the file and the line, and whether to go on without them: ``RowDataset``. Samples of the user's
own code have a number: ``CheckedSamples``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paceline.data.datasets import Batch, MapDataset
from paceline.data.images import IGNORED
from paceline.data.order import Indices
from paceline.errors import BadSampleError, DataError

_RULE = "  numbers are finite; tokens and classes are whole numbers from 0, and targets that do not count are -100"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """What a batch may hold: tokens below ``vocab_size`` as inputs, targets below ``classes``. None: not known.

    ``has_classes``: targets are classes or tokens, as for cross entropy. ``has_features``: inputs are floats.
    """

    vocab_size: int | None = None
    classes: int | None = None
    has_classes: bool = True
    has_features: bool = False


class CheckedSamples:
    """Samples of the user's own code. ``fetch_batch`` looks at them in the first epoch, and where they evaluate."""

    def __init__(self, dataset: MapDataset, rules: SampleRules, name: str) -> None:
        self.dataset, self.rules, self.name = dataset, rules, name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def check(self, batch: Batch, indices: Indices) -> None:
        check_own(batch, self.rules, self.name, indices.tolist())


def check_own(batch: Batch, rules: SampleRules, name: str, numbers: list[int]) -> None:
    """Raises ``BadSampleError`` with the number of the first sample of the user's own that is wrong."""
    for row, reason in find_bad(batch, rules).items():
        sample = f"sample {numbers[row]}" if row < len(numbers) else "a sample"
        raise BadSampleError(
            f"{name}: {sample} cannot be used: {reason}\n{_RULE}\n"
            "  mend it in the data set; where targets are something else, name a loss of your own: train.loss"
        )


def check_classes(count: int, where: str) -> None:
    """Raises ``DataError`` for data of a single class: a model that knows nothing has the loss 0 on them."""
    if count < 2:
        raise DataError(
            f"{where} has {count} class\n  a model tells at least two classes apart: with one, every loss is 0\n"
            "  check the path, or bring samples of the other classes"
        )


def find_bad(batch: Batch, rules: SampleRules, names: tuple[str, str] = ("inputs", "targets")) -> dict[int, str]:
    """Returns the rows of a batch that no run may train on, by number, with the reason.

    Of a batch that is no pair of tensors, only numbers that are NaN: what else they may be is not known.
    """
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
    if rules.has_classes:
        reasons.append(_no_class(targets, rules, names[1]))
    for each in reversed(reasons):  # of a row with several, the first is reported
        found |= each
    return dict(sorted(found.items()))


def _not_finite(values: torch.Tensor, name: str) -> dict[int, str]:
    if not values.is_floating_point() or not values.ndim or bool(values.sum().isfinite()):
        return {}
    return _named(values, ~values.isfinite(), repr(name), "")


def _no_class(targets: torch.Tensor, rules: SampleRules, name: str) -> dict[int, str]:
    if not targets.is_floating_point():
        noun = "classes" if rules.vocab_size is None else "tokens"
        return _outside(targets, rules.classes, name, noun, but=IGNORED)
    fractions = targets != targets.round()
    wrong = fractions if bool(fractions.any()) else torch.ones_like(targets, dtype=torch.bool)
    return _named(targets, wrong, repr(name), f" of type {targets.dtype}, and a class is of an integer type")


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
