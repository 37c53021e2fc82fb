"""Who talks to whom: the shapes of collectives that are more than a ring, as data.

    double tree   two binary trees over the same ranks; a rank has children in one of them at most, so that each tree
                  carries one half and every rank sends about as much as any other
    halving       ceil(log2 N) rounds; in each, a group of ranks falls into two halves, and every rank sends the part
                  that belongs to the other half to one rank there

Halving is usually told for powers of two. Here a group of odd size falls into halves that differ by one, whose parts of
the tensor differ alike; the rank without a partner sends to one that has another partner too. The N ranks together
still send (N-1) B bytes, which is the least that a reduce-scatter of B bytes can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class SliceMessage:
    """In one round: rank ``sender`` sends its slices ``first`` to ``last`` (exclusive) to rank ``receiver``."""

    sender: int
    receiver: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A rooted tree over ranks: the parent of each (-1: the root), and how far each is from the root."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def root(self) -> int:
        return self.parents.index(-1)

    @property
    def height(self) -> int:
        return max(self.depths)

    def children(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks right below ``rank``, in rank order."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == rank)


def make_tree(parents: tuple[int, ...]) -> Tree:
    """Makes a tree of what each rank's parent is."""
    depths = []
    for rank in range(len(parents)):
        depth, above = 0, parents[rank]
        while above >= 0:
            depth, above = depth + 1, parents[above]
        depths.append(depth)
    return Tree(parents, tuple(depths))


@lru_cache(maxsize=64)
def chain(size: int, source: int = 0) -> Tree:
    """Returns the ranks one after another, beginning with ``source``."""
    return make_tree(tuple(-1 if rank == source else (rank - 1) % size for rank in range(size)))


@lru_cache(maxsize=64)
def double_tree(size: int) -> tuple[Tree, Tree]:
    """Returns two binary trees over ``size`` ranks: whoever has children in one is a leaf of the other.

    In the first, ranks are numbered from left to right, so that every other one is a leaf. The second is its mirror
    image where that swaps leaves and others (an even number of ranks), and else the first moved on by one rank.
    """
    first = [_parent(rank + 1, size) - 1 for rank in range(size)]
    place = [size - 1 - rank if size % 2 == 0 else (rank + 1) % size for rank in range(size)]
    rank_at = {there: rank for rank, there in enumerate(place)}
    second = [-1 if first[place[rank]] < 0 else rank_at[first[place[rank]]] for rank in range(size)]
    return make_tree(tuple(first)), make_tree(tuple(second))


@lru_cache(maxsize=256)
def rooted_tree(size: int, source: int) -> Tree:
    """Returns the first of the double tree, its ranks moved on so that ``source`` is the root."""
    tree = double_tree(size)[0]
    shift = source - tree.root
    parents = [0] * size
    for rank, parent in enumerate(tree.parents):
        parents[(rank + shift) % size] = -1 if parent < 0 else (parent + shift) % size
    return make_tree(tuple(parents))


@lru_cache(maxsize=64)
def halving(size: int) -> tuple[tuple[SliceMessage, ...], ...]:
    """Returns the rounds of recursive halving, after which rank r has the sum of slice r."""
    rounds: list[tuple[SliceMessage, ...]] = []
    groups = [(0, size)]
    while any(last - first > 1 for first, last in groups):
        exchanges: list[SliceMessage] = []
        halves: list[tuple[int, int]] = []
        for first, last in groups:
            if last - first == 1:
                halves.append((first, last))
                continue
            middle = (first + last + 1) // 2
            exchanges += _exchanges(first, middle, last)
            halves += [(first, middle), (middle, last)]
        rounds.append(tuple(exchanges))
        groups = halves
    return tuple(rounds)


def _exchanges(first: int, middle: int, last: int) -> list[SliceMessage]:
    """Pairs the ranks of two neighbouring groups; the first one is larger by one at most."""
    found = []
    for rank in range(first, middle):
        partner = min(rank - first + middle, last - 1)
        found.append(SliceMessage(rank, partner, middle, last))
        if rank - first + middle < last:
            found.append(SliceMessage(partner, rank, first, middle))
    return found


def _parent(place: int, size: int) -> int:
    """Returns the parent of a place (from 1) of a binary tree numbered from left to right; 0 for its root.

    The number of zeros that a place ends with is its height. A parent beyond the last place is replaced by the nearest
    one that is there.
    """
    bit = place & -place
    if place == 1 << (size.bit_length() - 1):
        return 0
    above = (place ^ bit) | (bit << 1)
    while above > size:
        bit <<= 1
        above = (above ^ bit) | (bit << 1)
    return above
