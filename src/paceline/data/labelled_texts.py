"""Texts with a class each, for models that classify them: rows with a text, or a pair of texts, and a label.

A batch is as long as its longest text, and the others are padded behind; the model leaves the padding out of its
attention (``models/hugging_face.py``). Special tokens, such as [CLS] and [SEP], are those of the tokenizer; a text that
is longer than the context loses its end, and keeps them. Labels are numbers, or names: these are sorted, or those of
the model that knows them. Of pairs, inputs are two rows: tokens, and the text (0 or 1) that the tokenizer says each is
of; the longer text loses its end first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.config.data_sections import OnBad
from paceline.data.checked import refuse_sample
from paceline.data.datasets import IGNORED, EpochDataset, Pair
from paceline.data.order import Indices
from paceline.data.rows import Rows, read_row
from paceline.data.tokenizers import Tokenizer
from paceline.errors import DataError
from paceline.untrusted import reason_of

_CHUNK = 4096  # rows that are read together
_PLAIN = 2  # fields of a row without a second text


@dataclass(eq=False, kw_only=True)
class LabelledTexts(EpochDataset):
    """Padded tokens and classes: ``numbers`` by what rows have. ``fields`` name text, second text, class."""

    rows: Rows
    fields: tuple[str, ...]
    numbers: dict[Any, int]
    tokenizer: Tokenizer
    context: int
    on_bad: OnBad = "stop"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Indices, epoch: int) -> Pair:  # noqa: ARG002  # the same in all
        samples = [self._sample(index) for index in indices.tolist()]
        longest = max((len(tokens) for tokens, _, _ in samples), default=0)
        inputs = torch.full((len(samples), longest), pad_token(self.tokenizer))
        texts = torch.zeros_like(inputs)
        for row, (tokens, parts, _) in enumerate(samples):
            inputs[row, : len(tokens)], texts[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(parts)
        inputs = torch.stack([inputs, texts], 1) if len(self.fields) > _PLAIN else inputs
        return inputs, torch.tensor([number for _, _, number in samples])

    def _sample(self, index: int) -> tuple[list[int], list[int], int]:
        try:
            texts, label = self._found(read_row(self.rows, index, self.fields))
            return *self.tokenizer.encode_sample(texts, self.context), self.numbers[label]
        except (ValueError, DataError) as error:
            rule = "data.inputs (and data.text_pair) name texts of a row, and data.targets its class\n  mend the row"
            refuse_sample(f"{self.rows.place(index)} cannot be used: {reason_of(error)}", rule, self.on_bad, error)
            return [pad_token(self.tokenizer)], [0], IGNORED

    def _found(self, row: dict[str, Any]) -> tuple[list[str], Any]:
        *texts, label = (row[name] for name in self.fields)
        for name, text in zip(self.fields, texts, strict=False):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{name!r} is {text!r:.40}, and a text has words")
        if not isinstance(label, str | int) or label not in self.numbers:
            known = ", ".join(map(str, list(self.numbers)[:8]))
            raise ValueError(f"{self.fields[-1]!r} is {label!r:.40}, and the classes are {known}")
        return texts, label


def labels_of(rows: Rows, name: str) -> list[str] | None:
    """Returns the names that rows have as labels, sorted; None where the first one is no name. Reads all rows."""
    found: set[str] = set()
    for value in _values(rows, name):
        if not isinstance(value, str) and not found:
            return None
        if isinstance(value, str):
            found.add(value)
    return sorted(found) or None


def pad_token(tokenizer: Tokenizer) -> int:
    """Returns the token that stands behind the end of a shorter text: one of its own, or that of the end."""
    for found in (tokenizer.pad_token, tokenizer.end_token):
        if found is not None:
            return found
    what = f"the tokenizer {tokenizer.name} has no token for padding"
    rule = "texts of a batch are padded to the longest"
    raise DataError(f'{what}\n  {rule}\n  name one in its tokenizer_config.json: {{"pad_token": "[PAD]"}}')


def is_text(rows: Rows, name: str) -> bool:
    """Says whether the first row that has something under this name has a text."""
    return isinstance(next(_values(rows, name), None), str)


def other_fields(rows: Rows, name: str) -> list[str]:
    """Returns the fields of the first row, if no row that can be read has one of this name."""
    first = next(iter(_readable(rows, np.array([0]))), {})
    is_there = name in first or any(True for _ in _values(rows, name))
    return [] if is_there else list(first)


def _values(rows: Rows, name: str) -> Iterator[Any]:
    """Iterates over what rows have under a name; whoever reads a row that cannot be read tells of it."""
    start, size = 0, 1  # most callers look at the first row alone
    while start < len(rows):
        for row in _readable(rows, np.arange(start, min(start + size, len(rows)))):
            if row.get(name) is not None:
                yield row[name]
        start, size = start + size, _CHUNK


def _readable(rows: Rows, indices: Indices) -> list[dict[str, Any]]:
    """Returns rows that are read together, or one by one where one of them cannot be read."""
    try:
        return rows.read(indices)
    except ValueError:
        return [row for index in indices for row in _readable(rows, np.array([index]))] if len(indices) > 1 else []
