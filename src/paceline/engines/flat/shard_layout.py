"""Where the parameters of a flat group lie, and which slice of them is whose: known once, and the same ever after.

flat      | weight ............ | pad | bias | pad | weight .......... | pad |
slices    |  rank 0's slice  |  rank 1's slice  |  rank 2's slice  |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.shards import FlatLayout, Region, Spans, flat_layout, memory_order, row_major

ALIGN = 32  # elements: keeps every view, and every slice, on a cache line, whatever the dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout(FlatLayout):
    """A flat layout of named parameters, and this rank's slice of it.

    A *piece* is the part of one parameter that lies in this rank's slice, empty for some.
    """

    names: tuple[str, ...]
    start: int
    stop: int
    spans: Spans  # where in the slice each piece lies

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]], rank: int, num_ranks: int) -> ShardLayout:
        """Lays parameters out one after another, for ranks that get slices of one length."""
        flat = flat_layout(
            [tuple(parameter.shape) for _, parameter in named],
            strides=[dense_stride(parameter) for _, parameter in named],
            align=ALIGN,
            num_shards=ALIGN * num_ranks,
        )
        start, stop = flat.shard_range(rank, num_ranks)
        ends = [(slot.offset, slot.offset + slot.numel) for slot in flat.slots]
        spans = tuple((min(max(a, start), stop) - start, min(max(b, start), stop) - start) for a, b in ends)
        names = tuple(name for name, _ in named)
        return cls(slots=flat.slots, length=flat.length, names=names, start=start, stop=stop, spans=spans)

    @property
    def shard_length(self) -> int:
        return self.stop - self.start

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Returns the pieces in this rank's slice of a buffer."""
        return [shard[begin:end] for begin, end in self.spans]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yields what lies between the pieces of the slice, and behind them."""
        last = 0
        for begin, end in self.spans:
            yield last, begin
            last = end
        yield last, self.shard_length

    def region(self, place: int) -> Region:
        """Returns which part of the n-th parameter its piece is."""
        slot, (begin, end) = self.slots[place], self.spans[place]
        first = min(max(self.start - slot.offset, 0), slot.numel)
        order = memory_order(slot.shape, slot.stride)
        return Region(shape=slot.shape, begin=first, end=first + end - begin, order=order)

    def cut_piece(self, place: int, whole: torch.Tensor) -> torch.Tensor:
        """Returns the piece of a whole tensor of the n-th parameter's shape.

        May be a view of ``whole``. Raises ValueError for another shape, which a copy would stretch to fit.
        """
        slot, (begin, end) = self.slots[place], self.spans[place]
        if tuple(whole.shape) != slot.shape:
            raise ValueError(f"{self.names[place]} has the shape {list(slot.shape)}, not {list(whole.shape)}")
        skip = max(self.start - slot.offset, 0)
        if whole.stride() != slot.stride:
            whole = whole.new_empty_strided(slot.shape, slot.stride).copy_(whole)
        return whole.as_strided((slot.numel,), (1,))[skip : skip + end - begin]


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole parameter of which this may be a piece."""
    return tuple(getattr(parameter, "full_shape", parameter.shape))


def dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that a parameter has in a flat buffer: its own if they leave no holes and no overlap."""
    step = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != step:
            return row_major(parameter.shape)
        step *= size
    return parameter.stride() if 0 not in parameter.stride() else row_major(parameter.shape)
