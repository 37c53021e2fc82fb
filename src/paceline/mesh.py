"""Ranks on named axes: which coordinates a rank has, and who it talks to along an axis.

mesh = Mesh.of(replicate=2, shard=4)      # 8 ranks; the last axis varies fastest, so neighbours share a shard group
mesh.coordinates(5)                       # {'replicate': 1, 'shard': 1}
comm.split(mesh.group(comm.rank, "shard"))
comm.split(mesh.group(comm.rank, "replicate", "shard"))     # all that differ along one of the two, or both
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks. Ranks are numbered row by row: the last axis varies fastest."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """Makes a mesh from axis names and sizes, outermost first."""
        if wrong := {name: size for name, size in sizes.items() if size < 1}:
            raise UsageError(f"mesh axes {wrong}: every axis has at least one rank")
        return cls(tuple(sizes.items()))

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of ``rank`` on each axis."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not on a mesh of {self.size} ranks")
        result: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name, _ in self.axes}

    def rank(self, **coordinates: int) -> int:
        """Returns the rank at the given coordinates; an axis left out counts as 0."""
        if unknown := coordinates.keys() - {name for name, _ in self.axes}:
            raise UsageError(f"no axis {sorted(unknown)} on {self}")
        result = 0
        for name, size in self.axes:
            place = coordinates.get(name, 0)
            if not 0 <= place < size:
                raise UsageError(f"{name} = {place} is off the mesh: the axis has {size} ranks")
            result = result * size + place
        return result

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Returns the ranks that differ from ``rank`` along ``axes`` alone, in order, ``rank`` among them."""
        place = self.coordinates(rank)
        if unknown := [axis for axis in axes if axis not in place]:
            raise UsageError(f"no axis {unknown[0]!r} on {self}")
        ranges = [range(size) if name in axes else (place[name],) for name, size in self.axes]
        return tuple(self.rank(**dict(zip(place, each, strict=True))) for each in itertools.product(*ranges))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Returns every group along ``axes``; together they cover each rank once."""
        return sorted({self.group(rank, *axes) for rank in range(self.size)})

    def __str__(self) -> str:
        return "mesh(" + " x ".join(f"{name} {size}" for name, size in self.axes) + ")"


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, which are the sizes that an axis of so many ranks may have, smallest first."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
