"""The global order of samples, a pure function of (seed, epoch, index) with one integer of state; what was consumed.

The order never depends on ranks, accumulation or loader workers. An epoch's order is a keyed bijection that is computed
for the positions asked for, so that nothing is stored: a Feistel network on a rectangle. With ``rows =
ceil(sqrt(length))`` and just enough columns, a position is a cell ``(row, column)``; a round adds a hash of one
coordinate to the other, modulo its size, which is one-to-one whatever the hash. A position that lands on one of the
cells too many walks on until it is back inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    cost    about 70 numpy operations a call: 0.1 ms for 64 positions, 0.1 us a position in calls of thousands
    state   the number of samples consumed since the start of the run

``ConsumedIds`` is a running hash over the samples that the loader handed out; segments say what it should have been:

    hash(x_1 .. x_n) = sum of mix(x_i) * M^(n - i)   modulo 2^64, in two lanes
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError, UsageError

Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

# Four rounds look random on large domains. Eight also reach every order of a handful of samples about equally often.
_NUM_ROUNDS = 8
_CHUNK_SAMPLES = 16_384
_MASK = (1 << 64) - 1
_HASH_FIRST = np.uint64(0x9E3779B97F4A7C15)
_HASH_SECOND = np.uint64(0xD6E8FEB86659FD93)
_HALF_WORD = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of one step over all ranks: ``indices`` in order, and the state before and after."""

    position: int
    next_position: int
    epoch: int
    indices: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """The order in which a run consumes ``length`` samples, ``global_batch`` at a time, epoch after epoch.

    The last batch of an epoch is shorter, or left out with ``drop_last``. A position counts samples consumed so far.
    """

    length: int
    global_batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            fix = "check the path or the factory of the data, or lower data.eval_fraction"
            raise DataError(f"the training set has {self.length} samples\n  a run needs at least one\n  {fix}")
        if self.global_batch < 1:
            raise UsageError(f"global_batch = {self.global_batch}\n  a batch has at least one sample")
        if self.drop_last and self.global_batch > self.length:
            what = f"a global batch of {self.global_batch} is more than the {self.length} samples of the training set"
            fix = f'set data.last_batch = "keep", or a global batch of at most {self.length}'
            raise DataError(f"{what}\n  the ragged batch at an epoch's end is dropped, so none is left\n  {fix}")

    @property
    def num_indices(self) -> int:
        """How many samples there are to draw from."""
        return self.length

    @property
    def samples_per_epoch(self) -> int:
        """The samples that an epoch consumes: all of them, or those of whole batches with ``drop_last``."""
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.global_batch)

    @property
    def shortest_batch(self) -> int:
        return self.samples_per_epoch % self.global_batch or self.global_batch

    def position_of_step(self, step: int) -> int:
        """Returns the samples consumed by the first ``step`` steps of a run that starts at position 0."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return epoch * self.samples_per_epoch + batch * self.global_batch

    def batch_at(self, position: int) -> GlobalBatch:
        """Returns the batch that follows after ``position`` samples."""
        epoch, start = self._locate(position)
        stop = min(start + self.global_batch, self.samples_per_epoch)
        return self._cut(epoch, start, self._indices(epoch, start, stop))

    def batches(self, position: int) -> Iterator[GlobalBatch]:
        """Yields the batches after ``position``, without end: those of ``batch_at``, computed many at a time."""
        size = self.global_batch
        chunk = max(_CHUNK_SAMPLES // size, 1) * size
        while True:
            epoch, start = self._locate(position)
            stop = min(start + chunk, self.samples_per_epoch)
            if self.drop_last:
                stop -= (stop - start) % size
            indices = self._indices(epoch, start, stop)
            for offset in range(0, stop - start, size):
                yield self._cut(epoch, start + offset, indices[offset : offset + size])
            position = epoch * self.samples_per_epoch + stop

    def _locate(self, position: int) -> tuple[int, int]:
        if position < 0:
            raise UsageError(f"position = {position}\n  a position counts samples from 0")
        epoch, start = divmod(position, self.samples_per_epoch)
        if self.drop_last and start + self.global_batch > self.samples_per_epoch:
            return epoch + 1, 0
        return epoch, start

    def _indices(self, epoch: int, start: int, stop: int) -> Indices:
        positions = np.arange(start, stop, dtype=np.int64)
        return shuffled_index(positions, self.length, self.seed, epoch) if self.shuffle else positions

    def _cut(self, epoch: int, start: int, indices: Indices) -> GlobalBatch:
        position = epoch * self.samples_per_epoch + start
        return GlobalBatch(position=position, next_position=position + len(indices), epoch=epoch, indices=indices)


def share(indices: Indices, part: int, parts: int) -> Indices:
    """Returns the ``part``-th of ``parts`` contiguous pieces, whose sizes differ by at most one and may be zero."""
    size = len(indices)
    return indices[part * size // parts : (part + 1) * size // parts]


def shuffled_index(position: Indices, length: int, seed: int, epoch: int) -> Indices:
    """Returns the sample at each position of an epoch: a permutation of ``range(length)``, computed point by point."""
    if position.size == 0:
        return position.astype(np.int64)
    if int(position.min()) < 0 or int(position.max()) >= length:
        rule = f"positions of an epoch run from 0 to {length - 1}"
        raise UsageError(f"positions from {position.min()} to {position.max()} for {length} samples\n  {rule}")
    num_rows = math.isqrt(length - 1) + 1
    rows, columns, end = np.uint64(num_rows), np.uint64(-(-length // num_rows)), np.uint64(length)
    key = mix_seed(seed, epoch)
    keys = [np.uint64(mix_seed(key, number)) for number in range(_NUM_ROUNDS)]

    index = _permute(position.astype(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(index >= end)
    while outside.size:
        walked = _permute(index[outside], rows, columns, keys)
        index[outside] = walked
        outside = outside[walked >= end]
    return index.astype(np.int64)


def random_words(indices: Indices, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Returns 64 well-mixed bits for each index: a pure function of (seed, epoch, index), by splitmix64."""
    words = indices.astype(np.uint64) * _HASH_FIRST
    words += np.uint64(mix_seed(seed, epoch))
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def mix_seed(*numbers: int) -> int:
    """Returns 64 well-mixed bits that depend on every number and on their order (a chain of splitmix64)."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _permute(cells: _Words, rows: np.uint64, columns: np.uint64, keys: list[np.uint64]) -> _Words:
    row, column = np.divmod(cells, columns)
    for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
        row = _moved(row, column, row_key, rows)
        column = _moved(column, row, column_key, columns)
    row *= columns
    row += column
    return row


def _moved(coordinate: _Words, other: _Words, key: np.uint64, size: np.uint64) -> _Words:
    """Returns ``(coordinate + hash(other)) mod size``; uint64 arrays wrap around, as the hash wants."""
    hashed = other + key
    hashed *= _HASH_FIRST
    hashed ^= hashed >> _HALF_WORD
    hashed *= _HASH_SECOND
    hashed >>= _HALF_WORD
    hashed += coordinate
    hashed %= size
    return hashed


_LANES = ((0x9E3779B97F4A7C15, 0xD1342543DE82EF95), (0xC2B2AE3D27D4EB4F, 0xAF251AF3B0F025B5))  # added, multiplied
_FOLD_BATCHES = 64
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Samples that were consumed one after another: positions ``first`` to ``last`` of an order."""

    order: DataOrder
    first: int
    last: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.order), "first": self.first, "last": self.last}


class ConsumedIds:
    def __init__(self, order: DataOrder) -> None:
        self._order = order
        self._pending: list[Indices] = []
        self._first = self._last = 0  # of what was noted since, and is in no segment yet
        self.load_state_dict({"hash": "0" * 32, "count": 0, "segments": ()})

    def note(self, position: int, next_position: int, indices: Indices) -> None:
        """Takes the samples of a step over all ranks, in order."""
        if position != self._last:
            self._close_segment()
            self._first = position
        self._last = next_position
        self._pending.append(indices)
        if len(self._pending) >= _FOLD_BATCHES:
            self._fold()

    def skip(self, first: int, last: int) -> None:
        """Notes positions that are left out on purpose: a run that went back does not read them again."""
        if self._skipped and self._skipped[-1][1] == first:
            first = self._skipped.pop()[0]
        if first != last:
            self._skipped.append((first, last))

    def state_dict(self) -> dict[str, Any]:
        self._fold()
        self._close_segment()
        segments = [segment.to_json() for segment in self._segments]
        skipped = [list(each) for each in self._skipped]
        return {"hash": hash_text(self._hash), "count": self._count, "segments": segments, "skipped": skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        text = state["hash"]
        self._hash = (int(text[:16], 16), int(text[16:], 16))
        self._count = state["count"]
        self._segments = segments_of(state)
        self._skipped = skipped_of(state)
        self._pending = []
        self._first = self._last = 0

    def _close_segment(self) -> None:
        """Adds what was noted in one piece to the segments: to the last one, where it follows that."""
        if self._first < self._last:
            last = self._segments[-1] if self._segments else None
            if last is not None and last.order == self._order and last.last == self._first:
                self._segments.pop()
                self._first = last.first
            self._segments.append(Segment(order=self._order, first=self._first, last=self._last))
        self._first = self._last

    def _fold(self) -> None:
        if self._pending:
            indices = np.concatenate(self._pending)
            self._pending = []
            self._hash = extend_hash(self._hash, indices)
            self._count += len(indices)


def extend_hash(known: tuple[int, int], indices: Indices) -> tuple[int, int]:
    for first in range(0, len(indices), _CHUNK):
        part = indices[first : first + _CHUNK].astype(np.uint64)
        known = (_extend(known[0], part, *_LANES[0]), _extend(known[1], part, *_LANES[1]))
    return known


def segments_of(state: Mapping[str, Any]) -> list[Segment]:
    found = []
    for each in state["segments"]:
        order = DataOrder(**{name: value for name, value in each.items() if name not in ("first", "last")})
        found.append(Segment(order=order, first=each["first"], last=each["last"]))
    return found


def skipped_of(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns the positions that were left out on purpose, by first and last, of what ``state_dict`` gave."""
    return [(int(first), int(last)) for first, last in state.get("skipped", ())]


def batches_of(segments: Sequence[Segment]) -> Iterator[tuple[Segment, GlobalBatch]]:
    """Yields the batches that segments consist of; the last of each may reach beyond its end."""
    for segment in segments:
        for batch in segment.order.batches(segment.first):
            if batch.position >= segment.last:
                break
            yield segment, batch


def _extend(known: int, values: NDArray[np.uint64], added: int, factor: int) -> int:
    mixed = values + np.uint64(added)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    total = int((mixed * _powers(factor, len(values))).sum(dtype=np.uint64))
    return (known * pow(factor, len(values), 1 << 64) + total) & _MASK


@functools.lru_cache(maxsize=4)
def _powers(factor: int, length: int) -> NDArray[np.uint64]:
    """Returns the powers of a factor modulo 2^64, from the highest down to 1."""
    powers = np.full(length, factor, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)[::-1]


def hash_text(known: tuple[int, int]) -> str:
    return f"{known[0]:016x}{known[1]:016x}"
