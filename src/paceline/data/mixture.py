"""Several data sets as one, mixed by weights.

An epoch of N samples has c_s samples of source s: N in the proportion of the weights, rounded so that they add up.

    index        0 .. c_0 - 1 | c_0 .. c_0 + c_1 - 1 | ...    the order of the run shuffles them
    its sample   k = epoch * c_s + (index - first of s);  pass p, place j = divmod(k, samples of s)
                 sample j of the source's own order in pass p, a pure function of (seed, s, p)

So a source is read pass after pass, whatever its weight: none of its samples comes again before all of them came once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from paceline.data.datasets import Batch, DataShape, EpochDataset, MapDataset
from paceline.data.fetch import fetch_batch, is_in_memory
from paceline.data.order import Indices, mix_seed, shuffled_index
from paceline.data.tokenizers import Tokenizer
from paceline.errors import DataError

_MIXTURE = 0x6D697874757265  # keeps the orders of sources apart from that of the run


class Joined(EpochDataset):
    """Data sets one after another: each sample of each comes once in an epoch."""

    def __init__(self, sources: Mapping[str, MapDataset], counts: list[int] | None = None) -> None:
        self.names, self.sources = list(sources), list(sources.values())
        self.lengths = [len(source) for source in self.sources]
        self.counts = self.lengths if counts is None else counts
        self.reads_ahead = all(map(is_in_memory, self.sources))
        self._ends = np.cumsum(self.counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Indices, epoch: int) -> Batch:
        owners = np.searchsorted(self._ends, indices, side="right")
        parts: dict[str, Batch] = {}
        rows: list[Indices] = []
        for owner in np.unique(owners).tolist():
            held = np.flatnonzero(owners == owner)
            numbers = indices[held] - (self._ends[owner] - self.counts[owner]) + epoch * self.counts[owner]
            passes, places = np.divmod(numbers, self.lengths[owner])
            for each in np.unique(passes).tolist():
                chosen = passes == each
                found = self._ordered(places[chosen], owner, each)
                rows.append(held[chosen])
                parts[f"{self.names[owner]} (pass {each})"] = fetch_batch(self.sources[owner], found, each)
        return _join(parts, np.concatenate(rows))

    def _ordered(self, places: Indices, owner: int, of_pass: int) -> Indices:  # noqa: ARG002  # of mixtures
        return places


class Mixture(Joined):
    """Data sets of which each gives its share of an epoch, by weight. ``samples`` None: as many as they all have."""

    def __init__(
        self,
        sources: Mapping[str, MapDataset],
        weights: Mapping[str, float],
        seed: int,
        samples: int | None = None,
        shuffle: bool = True,
    ) -> None:
        lengths = {name: len(source) for name, source in sources.items()}
        for name, length in lengths.items():
            if not length:
                rule = "a mixture needs some of each source"
                raise DataError(f"data.sources.{name} has no samples to train on\n  {rule}")
        total = sum(lengths.values()) if samples is None else samples
        super().__init__(sources, proportional({name: weights[name] for name in sources}, total))
        self._seeds = [mix_seed(seed, _MIXTURE, number) for number in range(len(self.sources))] if shuffle else None

    def _ordered(self, places: Indices, owner: int, of_pass: int) -> Indices:
        if self._seeds is None:
            return places
        return shuffled_index(places, self.lengths[owner], self._seeds[owner], of_pass)


def proportional(weights: Mapping[str, float], total: int) -> list[int]:
    """Returns whole numbers in the proportion of weights that add up to ``total``, by the largest remainders."""
    exact = np.array(list(weights.values()), dtype=np.float64)
    exact = exact / exact.max()
    exact *= total / exact.sum()
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    for name, count in zip(weights, counts.tolist(), strict=True):
        if not count:
            what = f"data.weights.{name} = {weights[name]:g} gives no sample in an epoch of {total}"
            rule = "each source gives at least one"
            raise DataError(f"{what}\n  {rule}\n  raise the weight or data.samples, or leave the source out")
    return [int(count) for count in counts]


def common_shape(shapes: Mapping[str, DataShape]) -> DataShape:
    """Returns the sizes of a mixture's samples; raises ``DataError`` where its sources cannot stand in one batch."""
    first, *_ = shapes
    largest: dict[str, Any] = {}
    for field in (each.name for each in fields(DataShape)):
        values: dict[str, Any] = {name: getattr(shape, field) for name, shape in shapes.items()}
        if field in ("classes", "vocab_size"):
            largest[field] = None if None in values.values() else max(values.values())
            continue
        if field == "class_names":  # names with which the longest begin are taken for these: their numbers are the same
            longest = max(values.values(), key=lambda each: len(each or ()))
            values = {key: longest if not own or own == longest[: len(own)] else own for key, own in values.items()}
            largest[field] = values[first]
        for name, value in values.items():
            if value != values[first]:
                what = f"data.sources.{first} has {field} = {values[first]}, data.sources.{name} has {value}"
                rule = "samples of all sources stand in the same batches"
                raise DataError(f"{what}\n  {rule}\n  give them the same sizes")
    return replace(shapes[first], **largest)


def common_tokenizer(tokenizers: Mapping[str, Tokenizer | None]) -> Tokenizer | None:
    known = {name: each for name, each in tokenizers.items() if each is not None}
    if not known:
        return None
    first, *others = known
    found = known[first]
    for name in others:
        both_bytes = found.name == known[name].name == "bytes"  # one of them may have an end token
        if not both_bytes and found.files() != known[name].files():
            what = f"data.sources.{first} and data.sources.{name} have different tokenizers"
            rule = "a token stands for the same in all sources"
            raise DataError(f"{what}\n  {rule}\n  prepare them with one tokenizer: paceline data prepare")
        found = max(found, known[name], key=lambda each: each.vocab_size)
    return found


def _join(parts: dict[str, Batch], rows: Indices) -> Batch:
    """Joins what was read of each source, so that row ``rows[i]`` of the batch is row i of the parts."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    order = torch.from_numpy(np.argsort(rows))

    def join(*values: Any) -> torch.Tensor:
        if len({value.dtype for value in values}) > 1:
            raise TypeError(f"their types are {', '.join(str(value.dtype) for value in values)}")
        return torch.cat(values)[order]

    try:
        return tree_map(join, *parts.values())
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        what = f"samples of data.sources {', '.join(parts)} cannot stand in one batch: {error}"
        rule = "they are tensors of the same shapes and types"
        raise DataError(f"{what}\n  {rule}\n  bring them to one form in the sources") from error
