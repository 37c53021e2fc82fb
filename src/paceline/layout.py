"""Flatten, pad, shard: where each tensor lies in a flat buffer, and which slice of it a rank owns.

Pure arithmetic, shared by the engines and the checkpoints. A flat buffer holds tensors one after another, each
beginning at a multiple of ``align`` elements, and is padded to a multiple of the number of shards:

    | weight 0 ......... | pad | bias 0 | pad | weight 1 ............. | pad |
    | shard 0              | shard 1               | shard 2               |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one tensor in a flat buffer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
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
    shapes: Sequence[tuple[int, ...]],
    *,
    strides: Sequence[tuple[int, ...]] | None = None,
    align: int = 1,
    num_shards: int = 1,
    tail: int = 0,
) -> FlatLayout:
    """Lays tensors out one after another, with ``tail`` free elements behind the last one.

    ``strides`` are those of dense tensors in any dim order (channels last, say); row-major where not given.
    """
    slots, offset = [], 0
    for index, shape in enumerate(shapes):
        offset = round_up(offset, align)
        stride = strides[index] if strides is not None else row_major(shape)
        slots.append(Slot(shape=tuple(shape), stride=tuple(stride), offset=offset))
        offset += math.prod(shape)
    length = round_up(round_up(offset, align) + tail, num_shards)
    return FlatLayout(slots=tuple(slots), length=length)
