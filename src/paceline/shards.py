"""Flatten, pad, shard: where each tensor lies in a flat buffer, and which slice of it a rank owns.

Pure arithmetic, shared by the engines and the checkpoints. A flat buffer holds tensors one after another, each
beginning at a multiple of ``align`` elements, and is padded to a multiple of the number of shards:

    | weight 0 ......... | pad | bias 0 | pad | weight 1 ............. | pad |
    | shard 0              | shard 1               | shard 2               |

A *region* says which elements of a whole tensor somebody holds: what is left of the dims that are cut (by tensor
parallelism, by experts), and of that an interval in the order of memory. What two regions have in common comes out as
*runs*, elements that follow one another in both: as many as rows that a cut goes through, one along the first dim.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import nn

Shape: TypeAlias = tuple[int, ...]
Places: TypeAlias = NDArray[np.int64]
Spans: TypeAlias = tuple[tuple[int, int], ...]

_are_states_own = contextvars.ContextVar("_are_states_own", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one tensor in a flat buffer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view into ``buffer``, with its own strides."""
        return buffer[self.offset : self.offset + self.numel].as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Slots in order, and the padded length of the buffer."""

    slots: tuple[Slot, ...]
    length: int

    def shard_range(self, shard: int, num_shards: int) -> tuple[int, int]:
        """Returns the first and the one-past-last element that ``shard`` owns; the length must divide."""
        assert self.length % num_shards == 0, (self.length, num_shards)
        size = self.length // num_shards
        return shard * size, (shard + 1) * size

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [slot.view(buffer) for slot in self.slots]


def round_up(value: int, multiple: int) -> int:
    """Returns the least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def flat_layout(
    shapes: Sequence[Shape],
    *,
    strides: Sequence[Shape] | None = None,
    align: int = 1,
    num_shards: int = 1,
    tail: int = 0,
) -> FlatLayout:
    """Lays tensors out one after another, dense as ``strides`` say (or row-major), with ``tail`` elements behind."""
    slots, offset = [], 0
    for index, shape in enumerate(shapes):
        offset = round_up(offset, align)
        stride = strides[index] if strides is not None else row_major(shape)
        slots.append(Slot(shape=tuple(shape), stride=tuple(stride), offset=offset))
        offset += math.prod(shape)
    length = round_up(round_up(offset, align) + tail, num_shards)
    return FlatLayout(slots=tuple(slots), length=length)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the dims of a dense tensor from slowest to fastest, those of one element first; None: row-major."""
    real = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: (-stride[dim], dim))
    if real == sorted(real):
        return None
    return (*(dim for dim, size in enumerate(shape) if size <= 1), *real)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Which elements of a tensor of ``shape`` somebody holds, and in which order.

    ``cuts`` are the dims of which it has a part, each with its spans, one after another. What is left is a tensor of
    its own, whose memory runs through the dims in ``order`` (row-major: None); the region is its elements ``begin`` to
    ``end``.
    """

    shape: tuple[int, ...]
    begin: int
    end: int
    cuts: tuple[tuple[int, Spans], ...] = ()
    order: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what is left of the tensor, before the interval is taken."""
        extents = {dim: sum(last - first for first, last in spans) for dim, spans in self.cuts}
        return tuple(extents.get(dim, size) for dim, size in enumerate(self.shape))

    @property
    def is_whole_part(self) -> bool:
        """Whether the interval is all that is left of the tensor, in row-major order."""
        return self.order is None and self.begin == 0 and self.end == math.prod(self.local_shape)

    @property
    def has_first(self) -> bool:
        """Whether the tensor's first element is in it: of all that hold a part, one does."""
        return self.begin == 0 and self.end > 0 and all(spans and spans[0][0] == 0 for _, spans in self.cuts)

    def narrow(self, first: int, last: int) -> Region:
        """Returns its elements ``first`` to ``last``, counted in its own order."""
        assert 0 <= first <= last <= self.size, (first, last, self)
        return replace(self, begin=self.begin + first, end=self.begin + last)


def whole_region(shape: Sequence[int], order: tuple[int, ...] | None = None) -> Region:
    """Returns the region of all elements."""
    return Region(shape=tuple(shape), begin=0, end=math.prod(shape), order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a rank holds of one tensor: the elements themselves, and where in the whole they belong.

    ``copies`` ranks hold the same and share the writing of it; this one is number ``copy``, or writes nothing (None).
    ``parameter`` is what an optimizer knows it by, where that is another tensor.
    """

    name: str
    region: Region
    tensor: torch.Tensor
    copy: int | None = 0
    copies: int = 1
    parameter: torch.Tensor | None = None


class Runs(NamedTuple):
    """Elements that follow one another in two places: where each run starts in both, and how long it is."""

    ours: Places
    theirs: Places
    length: Places


def common_runs(ours: Region, theirs: Region) -> Runs:
    """Returns what two regions of one tensor have in common, by places within each, in the order of ``theirs``.

    Takes memory for each run; where the two lie in memory in other orders of dims, every element is one.
    """
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    left, right = _runs(ours, theirs.order), _runs(theirs, theirs.order)
    left_end, right_end = left.theirs + left.length, right.theirs + right.length
    first = np.searchsorted(right_end, left.theirs, side="right")
    count = np.maximum(np.searchsorted(right.theirs, left_end, side="left") - first, 0)
    a = np.repeat(np.arange(len(count)), count)
    b = np.arange(len(a)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    start = np.maximum(left.theirs[a], right.theirs[b])
    stop = np.minimum(left_end[a], right_end[b])
    return Runs(left.ours[a] + start - left.theirs[a], right.ours[b] + start - right.theirs[b], stop - start)


def _runs(region: Region, order: tuple[int, ...] | None) -> Runs:
    """Returns a region as runs of the whole tensor laid out in ``order``, which rise in both places where they can."""
    if region.size == 0:
        empty = np.zeros(0, dtype=np.int64)
        return Runs(empty, empty, empty)
    if region.order != order:
        return _element_runs(region, order)
    if not region.cuts:
        return Runs(*(np.array([value], dtype=np.int64) for value in (0, region.begin, region.size)))
    dims = order or tuple(range(len(region.shape)))
    spans_of = dict(region.cuts)
    at = max(dims.index(dim) for dim in spans_of)  # the innermost dim that is cut: behind it, elements stay together
    inner = math.prod(region.shape[dim] for dim in dims[at + 1 :])
    spans = spans_of[dims[at]]
    lengths = np.array([last - first for first, last in spans], dtype=np.int64)
    row, whole_row = int(lengths.sum()) * inner, region.shape[dims[at]] * inner
    rows = np.arange(region.begin // row, -(-region.end // row), dtype=np.int64)
    offsets = (np.cumsum(lengths) - lengths) * inner
    local = (rows[:, None] * row + offsets).ravel()
    starts = np.array([first for first, _ in spans], dtype=np.int64) * inner
    whole_rows = rows
    if len(region.cuts) > 1:  # dims before it are cut too: rows stand elsewhere among those of the whole tensor
        found = np.unravel_index(rows, [region.local_shape[dim] for dim in dims[:at]])
        whole_rows = _ravel(region, found, dims[:at], dims[:at])
    place = (whole_rows[:, None] * whole_row + starts).ravel()
    begin = np.maximum(local, region.begin)
    end = np.minimum(local + np.tile(lengths * inner, len(rows)), region.end)
    kept = end > begin
    return Runs((begin - region.begin)[kept], (place + begin - local)[kept], (end - begin)[kept])


def _ravel(region: Region, found: Sequence[NDArray[np.intp]], dims: Sequence[int], order: Sequence[int]) -> Places:
    """Returns the places in the whole tensor, laid out in ``order``, of what has the local coordinates ``found``."""
    coordinates = {dim: index.astype(np.int64) for dim, index in zip(dims, found, strict=True)}
    for dim, spans in region.cuts:
        if dim in coordinates:
            held = np.concatenate([np.arange(first, last, dtype=np.int64) for first, last in spans])
            coordinates[dim] = held[coordinates[dim]]
    whole = [region.shape[dim] for dim in order]
    return np.ravel_multi_index([coordinates[dim] for dim in order], whole).astype(np.int64)


def _element_runs(region: Region, order: tuple[int, ...] | None) -> Runs:
    """Returns every element as a run of its own, in the order of the whole tensor laid out in ``order``."""
    dims = tuple(range(len(region.shape)))
    mine, theirs = region.order or dims, order or dims
    shape = region.local_shape
    found = np.unravel_index(np.arange(region.begin, region.end), [shape[dim] for dim in mine])
    place = _ravel(region, found, mine, theirs)
    sequence = np.argsort(place, kind="stable")
    return Runs(sequence.astype(np.int64), place[sequence], np.ones(region.size, dtype=np.int64))


# States of what a rank holds. Users of a module or an optimizer get whole ones, or an error (``torch_helpers.py``).


@contextlib.contextmanager
def own_states() -> Iterator[None]:
    """Lets modules and optimizers give and take the state of what this rank holds, as torch itself does."""
    token = _are_states_own.set(True)
    try:
        yield
    finally:
        _are_states_own.reset(token)


def are_states_own() -> bool:
    """Says whether a state is that of what this rank holds: inside ``own_states``."""
    return _are_states_own.get()


def own_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's state of what this rank updates, its tensors themselves."""
    with own_states():
        return optimizer.state_dict()


def load_own_state(owner: nn.Module | torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the state of what this rank holds into its tensors, also where users may not: see ``torch_helpers.py``."""
    with own_states():
        owner.load_state_dict(state)
