"""Documents in rows of ``context`` tokens, and what that leaves empty.

    none       a a a a . . . . | b b . . . . . . | c c c . . . . .     a document a row
    stream     a a a a b b c c | c . . . . . . .                       one after another, cut where a row is full
    best_fit   a a a a c c c . | b b . . . . . .                       whole, the longest first, each into the fullest
                                                                       row that has room for it (best-fit decreasing)

A document that is longer than a row fills rows of its own, and the rest is packed like any other. Each document has
``sizes[i]`` places, the last of which is its end and has no target. Where a model keeps documents apart it sees them by
that end; only a piece that fills its row may lack it. What stays empty is filled with ends, none of which is a target:
a document of their own (``document_starts`` in models/gpt.py). Rows are made once, a pure function of sizes and seed,
so that the order of a run and its resume are those of any data set. Best fit takes the lengths one by one, and all rows
of one kind together: about a second for a million documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.data_sections import Packing
from paceline.data.datasets import IGNORED, EpochDataset, Pair
from paceline.data.order import Indices, random_words
from paceline.data.rows import RowDataset
from paceline.data.token_files import MappedTokens
from paceline.errors import BadSampleError, DataError

_LEAST = 2  # places of a document that has a target


class Documents(Protocol):
    """Documents by number. ``reads_ahead``: quick enough to be read by a thread of the rank."""

    sizes: Indices
    reads_ahead: bool

    def read(self, number: int, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the inputs and the targets at some places of a document."""


class TokenDocuments:
    """The documents of a row of tokens, each with the end token behind it; the last one may lack it."""

    reads_ahead = True

    def __init__(self, tokens: MappedTokens, starts: Indices, sizes: Indices, end_token: int) -> None:
        self.tokens, self.starts, self.sizes, self.end_token = tokens, starts, sizes, end_token

    def read(self, number: int, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, left = self.starts[number] + first, int(self.sizes[number]) - first
        known = min(count + 1, left, len(self.tokens) - int(start))
        found = np.full(count + 1, self.end_token, dtype=np.int64)
        found[:known] = self.tokens.read(np.array([start]), known)[0]
        targets = found[1:].copy()
        targets[known - 1 :] = IGNORED
        return found[:-1], targets


def token_documents(
    tokens: MappedTokens, end_token: int, eval_fraction: float = 0.0
) -> tuple[TokenDocuments, TokenDocuments | None]:
    """Cuts tokens behind each end: documents to train on, and those that begin in the last ``eval_fraction``."""
    ends = tokens.places_of(end_token)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends + 1])
    starts = starts[starts < len(tokens)]
    sizes = np.diff(starts, append=len(tokens))
    sizes[-1] += not len(ends) or int(ends[-1]) != len(tokens) - 1  # an end that is not there has a place too
    if eval_fraction == 0:
        return TokenDocuments(tokens, starts, sizes, end_token), None
    cut = int(np.searchsorted(starts, round(len(tokens) * (1 - eval_fraction))))
    first, last = slice(cut), slice(cut, None)
    kept = TokenDocuments(tokens, starts[last], sizes[last], end_token)
    return TokenDocuments(tokens, starts[first], sizes[first], end_token), kept


class RowDocuments:
    """Rows of a file, a document each, read once for their sizes. A missing ``end_token`` is added, as no target."""

    reads_ahead = False

    def __init__(self, rows: RowDataset, numbers: Indices, end_token: int | None) -> None:
        self.rows, self.numbers, self.end_token = rows, numbers, end_token
        found = (rows.document(number, end_token) for number in numbers.tolist())
        self.sizes = np.array([0 if each is None else len(each[0]) for each in found], dtype=np.int64)

    def read(self, number: int, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self.rows.document(int(self.numbers[number]), self.end_token)
        if found is None or len(found[0]) != self.sizes[number]:
            what = f"{self.rows.rows.place(int(self.numbers[number]))} has changed since it was packed"
            raise BadSampleError(f"{what}\n  rows are packed by their lengths, once\n  start the run again")
        inputs, targets = (each[first : first + count].numpy() for each in found)
        return inputs, targets


class Pieces(NamedTuple):
    """``counts[i]`` places of a document from ``firsts[i]`` on, in a row."""

    documents: Indices
    firsts: Indices
    counts: Indices
    rows: Indices


def make_pieces(sizes: Indices, context: int, packing: Packing, seed: int) -> Pieces:
    """Cuts documents into pieces of at most ``context`` places, and says which row each is in, row after row."""
    kept = np.flatnonzero(sizes >= _LEAST)
    sizes = sizes[kept]
    if packing == "stream":
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        places = np.unique(np.concatenate([ends - sizes, np.arange(0, total, context)]))
        owners = np.searchsorted(ends, places, side="right")
        firsts, counts = places - (ends - sizes)[owners], np.diff(places, append=total)
        return Pieces(kept[owners], firsts, counts, places // context)
    # The last place needs no row of its own, as it has no target.
    number = -(-(sizes - 1) // context)
    owners = np.repeat(np.arange(len(sizes)), number)
    firsts = (np.arange(len(owners)) - np.repeat(np.cumsum(number) - number, number)) * context
    counts = np.minimum(sizes[owners] - firsts, context)
    rows = np.arange(len(owners)) if packing == "none" else fit_best(counts, context, seed)
    order = np.argsort(rows, kind="stable")
    return Pieces(kept[owners[order]], firsts[order], counts[order], rows[order])


def fit_best(counts: Indices, context: int, seed: int) -> Indices:
    """Returns the row of each piece, by best-fit decreasing; the seed chooses among pieces of one length."""
    order = np.lexsort((random_words(np.arange(len(counts)), seed, 0), -counts))
    found, rows, done, opened = np.empty_like(counts), _OpenRows(), 0, 0
    lengths, numbers = np.unique(-counts, return_counts=True)
    for length, number in zip((-lengths).tolist(), numbers.tolist(), strict=True):
        while number:
            room, chosen = rows.take(length)
            if room is None:
                room, chosen = context, np.arange(opened, opened + -(-number // (context // length)))
                opened += len(chosen)
            each = room // length  # pieces of this length that fill a row
            used = min(len(chosen), -(-number // each))
            put = min(number, used * each)
            found[order[done : done + put]] = np.repeat(chosen[:used], each)[:put]
            last = put - (used - 1) * each
            rows.add(room, chosen[used:])
            rows.add(room - each * length, chosen[: used - 1])
            rows.add(room - last * length, chosen[used - 1 : used])
            done, number = done + put, number - put
    return found


class _OpenRows:
    """Rows by the places that they have left."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # ascending
        self._rows: dict[int, list[Indices]] = {}

    def take(self, length: int) -> tuple[int | None, Indices]:
        """Returns the rows with the least room that is enough, and takes them out; None where no row has it."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            return None, np.empty(0, dtype=np.int64)
        room = self._rooms.pop(at)
        return room, np.concatenate(self._rows.pop(room))

    def add(self, room: int, rows: Indices) -> None:
        if room < _LEAST or not len(rows):
            return
        if room not in self._rows:
            insort(self._rooms, room)
        self._rows.setdefault(room, []).append(rows)


class PackedRows(EpochDataset):
    """Rows of documents, the same in every epoch. Without an ``end_token``, what stays empty is filled with 0."""

    def __init__(
        self, documents: Documents, context: int, packing: Packing, *, seed: int, end_token: int | None, source: str
    ) -> None:
        self.documents, self.context, self.packing, self.end_token = documents, context, packing, end_token
        self.source = source
        self.reads_ahead = documents.reads_ahead
        self._pieces = make_pieces(documents.sizes, context, packing, seed)
        rows = self._pieces.rows
        if not len(rows):
            what = f"{source} has {len(documents.sizes)} documents, and none has two tokens"
            raise DataError(f"{what}\n  a document without a second token has no target\n  bring others, or more")
        self._ends = np.searchsorted(rows, np.arange(int(rows[-1]) + 1), side="right")

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, indices: Indices, epoch: int) -> Pair:  # noqa: ARG002  # the same in all
        inputs = np.full((len(indices), self.context), self.end_token or 0)
        targets = np.full_like(inputs, IGNORED)
        pieces = self._pieces
        for row, index in enumerate(indices.tolist()):
            place = 0
            for piece in range(int(self._ends[index - 1]) if index else 0, int(self._ends[index])):
                where = slice(place, place := place + int(pieces.counts[piece]))
                document, first = int(pieces.documents[piece]), int(pieces.firsts[piece])
                inputs[row, where], targets[row, where] = self.documents.read(document, first, where.stop - where.start)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def detail(self) -> dict[str, Any]:
        """Returns what a run records: how full the rows are, and what became of documents that did not fit."""
        sizes, rows = self.documents.sizes, len(self)
        pieces = np.bincount(self._pieces.documents, minlength=len(sizes))
        padding = 1 - int(self._pieces.counts.sum()) / (rows * self.context)
        kept, cut, left_out = (int(each.sum()) for each in (pieces > 0, pieces > 1, pieces == 0))
        note = f"{self.source}, packing = {self.packing}: {kept:,} documents in {rows:,} rows"
        note += f" of {self.context:,} tokens, {100 * padding:.1f} % padding"
        if cut:
            note += f"; {cut:,} are cut, into {int(pieces[pieces > 1].sum()):,} pieces"
        if left_out:
            note += f"; {left_out:,} of fewer than 2 tokens are left out"
        numbers = {"documents": kept, "rows": rows, "padding": padding, "cut": cut, "left_out": left_out}
        return {"note": note, **numbers}


def packing_details(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yields what is to be told of the rows of a data set, or of each source of a mixture."""
    if isinstance(dataset, PackedRows):
        yield dataset.detail()
    for source in getattr(dataset, "sources", ()):
        yield from packing_details(source)
