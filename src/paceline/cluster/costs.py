"""What a collective costs: seconds by size, ranks and hosts, bytes per rank and on a host's link; who talks to whom.

A message of b bytes takes alpha + beta b seconds. For B bytes on N ranks, chunks of C bytes, trees of height D:

    ring               2 (N-1) (alpha + beta B/N)
    halving_doubling   2 log2 N alpha + 2 beta B (N-1)/N     for a power of two; else by its rounds
    tree               2 (D (alpha + beta C) + beta B)       up, and down again; each tree carries one half
    hierarchical       2 (alpha + beta B (L-1)/L) inside a host of L ranks, and among the H hosts an all-reduce of B/L
                       by every rank: 2 beta' B (H-1)/H on the link that they share

Where ranks are on several hosts, a round lasts as long as its slowest part: a rank's own messages at ``inside``, or all
messages that leave a host, one behind the other, at ``across``. Of K network cards a host has, one rank uses one: its
messages take K beta' b. So a ring, in which one rank of a host sends to the next host, reaches one K-th of ``across``.
Ranks are numbered host by host, as launchers do.

A benchmark's record of all-reduces, where ``auto`` is given one, takes the place of the formulas. Between two sizes
that were measured, a figure lies on a straight line of the logarithms.

    double tree   two binary trees over the same ranks; a rank has children in one of them at most, so that each tree
                  carries one half and every rank sends about as much as any other
    halving       ceil(log2 N) rounds; in each, a group of ranks falls into two halves, and every rank sends the part
                  that belongs to the other half to one rank there. Halves of an odd group differ by one; the rank
                  without a partner sends to one that has another. Together they send (N-1) B bytes, the least.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from paceline.errors import UsageError
from paceline.untrusted import parse_json, read_regular

Algorithm: TypeAlias = Literal["ring", "tree", "halving_doubling", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
CHUNK_BYTES = 256 * 1024
_Part: TypeAlias = tuple[int, int, float]  # sender, receiver, bytes
Choice: TypeAlias = Literal["native"] | Algorithm
_CHOICES: tuple[Choice, ...] = ("native", *get_args(Algorithm))
_FIX = "  write one there: paceline bench comm --output FILE, python bench/links.py --speed MBIT --output FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A way for messages: seconds of each, and bytes per second."""

    alpha_s: float
    bandwidth: float

    def seconds(self, num_bytes: float, rounds: float = 1) -> float:
        """Returns how long ``rounds`` messages take that have ``num_bytes`` together."""
        return rounds * self.alpha_s + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The links between ranks of a host, and all cards of a host to others together; by default as measured on Gloo."""

    inside: Wire = Wire(alpha_s=2e-4, bandwidth=1.3e9)
    across: Wire = Wire(alpha_s=3e-4, bandwidth=1.2e9)
    cards: int = 1

    def across_seconds(self, host_bytes: float, rank_bytes: float, rounds: float = 1) -> float:
        """Returns how long it takes that ``host_bytes`` leave a host, of which one rank sends ``rank_bytes``."""
        return self.across.seconds(max(host_bytes, self.cards * rank_bytes), rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many ranks there are, and on how many hosts; these have as many each, numbered one after another."""

    ranks: int
    hosts: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.hosts < 1 or self.ranks % self.hosts:
            what = f"{self.ranks} ranks on {self.hosts} hosts: every host has the same number of ranks, one at least"
            raise UsageError(f"{what}")

    @property
    def node_ranks(self) -> int:
        return self.ranks // self.hosts

    def host(self, rank: int) -> int:
        return rank // self.node_ranks


def all_reduce_seconds(algorithm: Algorithm, num_bytes: float, where: Placement, links: Wires) -> float:
    if where.ranks == 1:
        return 0.0
    if algorithm == "ring":
        return 2 * _ring_seconds(num_bytes, where, links)
    if algorithm == "halving_doubling":
        return 2 * _halving_seconds(num_bytes, where, links)
    if algorithm == "tree":
        up = [_edges(tree, num_bytes / 2) for tree in double_tree(where.ranks)]
        height = max(tree.height for tree in double_tree(where.ranks))
        return 2 * _pipeline_seconds([*up[0], *up[1]], height, min(CHUNK_BYTES, num_bytes / 2), where, links)
    local, hosts = where.node_ranks, where.hosts
    inside = links.inside.seconds(num_bytes * (local - 1) / local) if local > 1 else 0.0
    if hosts == 1:
        return 2 * inside
    rounds = hosts - 1 if hosts & (hosts - 1) else hosts.bit_length() - 1
    leaving = num_bytes * (hosts - 1) / hosts
    return 2 * (inside + links.across_seconds(leaving, leaving / local, rounds))


def scatter_seconds(algorithm: Algorithm, num_bytes: float, where: Placement, links: Wires) -> float:
    """Returns how long a reduce-scatter or an all-gather of ``num_bytes`` in all takes; no tree has one."""
    if where.ranks == 1:
        return 0.0
    if algorithm == "hierarchical":  # a round inside for each host, whose slices are added up there, and a ring across
        local, hosts = where.node_ranks, where.hosts
        inside = links.inside.seconds(num_bytes * (local - 1) / local, hosts) if local > 1 else 0.0
        leaving = num_bytes * (hosts - 1) / hosts
        return inside + (links.across_seconds(leaving, leaving / local, hosts - 1) if hosts > 1 else 0.0)
    return (_ring_seconds if algorithm == "ring" else _halving_seconds)(num_bytes, where, links)


def broadcast_seconds(algorithm: Algorithm, num_bytes: float, where: Placement, links: Wires) -> float:
    """Returns how long a broadcast takes: from rank to rank (ring), or down a tree whose ranks send twice."""
    if where.ranks == 1:
        return 0.0
    tree = chain(where.ranks) if algorithm == "ring" else rooted_tree(where.ranks, 0)
    down = _back(_edges(tree, num_bytes))
    return _pipeline_seconds(down, tree.height, min(CHUNK_BYTES, num_bytes), where, links)


def fastest_all_reduce(num_bytes: float, where: Placement, links: Wires) -> Algorithm:
    """Returns the algorithm whose formula says the least; the simpler one where two say the same."""
    known: tuple[Algorithm, ...] = ALGORITHMS if where.hosts > 1 else ("ring", "tree", "halving_doubling")
    return min(known, key=lambda name: all_reduce_seconds(name, num_bytes, where, links))


def fastest_scatter(num_bytes: float, where: Placement, links: Wires) -> Algorithm:
    known: tuple[Algorithm, ...] = ("ring", "halving_doubling")
    if where.hosts > 1:
        known = (*known, "hierarchical")
    return min(known, key=lambda name: scatter_seconds(name, num_bytes, where, links))


def fastest_broadcast(num_bytes: float, where: Placement, links: Wires) -> Algorithm:
    known: tuple[Algorithm, ...] = ("ring", "tree")
    return min(known, key=lambda name: broadcast_seconds(name, num_bytes, where, links))


def sent_bytes(algorithm: Algorithm, num_bytes: float, where: Placement, rank: int) -> float:
    """Returns what a rank sends for an all-reduce, where the ranks divide the size."""
    return sum(size for sender, _, size in all_reduce_messages(algorithm, num_bytes, where) if sender == rank)


def host_link_bytes(algorithm: Algorithm, num_bytes: float, where: Placement) -> float:
    """Returns what leaves the busiest host for an all-reduce; as much comes in."""
    return _busiest(_leaving(all_reduce_messages(algorithm, num_bytes, where), where))


def all_reduce_messages(algorithm: Algorithm, num_bytes: float, where: Placement) -> list[tuple[int, int, float]]:
    """Lists sender, receiver and bytes of all messages of an all-reduce, those between the same two added up."""
    size = where.ranks
    if size == 1:
        return []
    if algorithm == "ring":
        return [(rank, (rank + 1) % size, 2 * num_bytes * (size - 1) / size) for rank in range(size)]
    if algorithm == "hierarchical":
        return _hierarchical_messages(num_bytes, where)
    if algorithm == "tree":
        up = [part for tree in double_tree(size) for part in _edges(tree, num_bytes / 2)]
    else:
        up = [part for each in _halving_rounds(num_bytes, size) for part in each]
    return up + _back(up)


def _ring_seconds(num_bytes: float, where: Placement, links: Wires) -> float:
    """Returns the time of one way round. A host passes on one message a round, however many ranks it has."""
    rounds, each = where.ranks - 1, num_bytes / where.ranks
    slowest = links.inside.seconds(each)
    if where.hosts > 1:
        slowest = max(slowest if where.node_ranks > 1 else 0.0, links.across_seconds(each, each))
    return rounds * slowest


def _halving_seconds(num_bytes: float, where: Placement, links: Wires) -> float:
    return sum(_round_seconds(each, where, links) for each in _halving_rounds(num_bytes, where.ranks))


def _pipeline_seconds(parts: list[_Part], height: int, chunk: float, where: Placement, links: Wires) -> float:
    """Returns the time until all chunks have gone all the way: the busiest sender, receiver or host sets the pace."""
    crosses = any(where.host(sender) != where.host(receiver) for sender, receiver, _ in parts)
    slowest = links.across if crosses else links.inside
    alpha = max(slowest.alpha_s, links.inside.alpha_s if where.node_ranks > 1 else 0.0)
    each = chunk / slowest.bandwidth * (links.cards if crosses else 1)
    busiest = _round_seconds(parts, where, links)
    return height * (alpha + each) + max(0.0, busiest - alpha - each)


def _round_seconds(parts: list[_Part], where: Placement, links: Wires) -> float:
    """Returns the longest time of: what a rank sends, what it receives, and what leaves or enters a host."""
    inside = [part for part in parts if where.host(part[0]) == where.host(part[1])]
    near = links.inside.seconds(_most_sent(inside)) if inside else 0.0
    across = [part for part in parts if where.host(part[0]) != where.host(part[1])]
    by_host = _most_sent(_leaving(across, where))
    return max(near, links.across_seconds(by_host, _most_sent(across)) if across else 0.0)


def _halving_rounds(num_bytes: float, size: int) -> list[list[_Part]]:
    return [[(e.sender, e.receiver, num_bytes * (e.last - e.first) / size) for e in each] for each in halving(size)]


def _hierarchical_messages(num_bytes: float, where: Placement) -> list[_Part]:
    local, hosts, found = where.node_ranks, where.hosts, []
    for rank in range(where.ranks):
        host, place = divmod(rank, local)
        # Inside: a slice to each owner, and the sum of one's own back to each.
        found += [(rank, host * local + other, 2 * num_bytes / local) for other in range(local) if other != place]
    across = Placement(ranks=hosts)
    among: Algorithm = "ring" if hosts & (hosts - 1) else "halving_doubling"
    for place in range(local):
        for sender, receiver, size in all_reduce_messages(among, num_bytes / local, across):
            found.append((sender * local + place, receiver * local + place, size))
    return found


def _edges(tree: Tree, num_bytes: float) -> list[_Part]:
    return [(rank, parent, num_bytes) for rank, parent in enumerate(tree.parents) if parent >= 0]


def _back(parts: list[_Part]) -> list[_Part]:
    return [(receiver, sender, size) for sender, receiver, size in parts]


def _busiest(parts: list[_Part]) -> float:
    """Returns the most bytes that a sender sends."""
    sent: dict[int, float] = {}
    for sender, _, size in parts:
        sent[sender] = sent.get(sender, 0.0) + size
    return max(sent.values(), default=0.0)


def _most_sent(parts: list[_Part]) -> float:
    """Returns the most bytes that a rank sends, or receives."""
    return max(_busiest(parts), _busiest(_back(parts)))


def _leaving(parts: list[_Part], where: Placement) -> list[_Part]:
    """Returns the messages that leave a host, with hosts in the place of ranks."""
    hosts = [(where.host(sender), where.host(receiver), size) for sender, receiver, size in parts]
    return [part for part in hosts if part[0] != part[1]]


# What was measured.


def figure_between(points: Sequence[tuple[int, float]], size: float) -> float:
    """Returns the figure of a size; ``points`` are (size, figure) in growing order, beyond which it stays the same."""
    place = bisect_left([each for each, _ in points], size)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (low, first), (high, second) = points[place - 1], points[place]
    share = math.log(size / low) / math.log(high / low)
    return first * math.pow(second / first, share)


def seconds_between(points: Sequence[tuple[int, float]], size: float) -> float:
    """Returns the seconds of a size between (size, seconds) in growing order; they grow beyond the largest."""
    largest, seconds = points[-1]
    return seconds * size / largest if size > largest else figure_between(points, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """Seconds by bytes, in growing order, of each way to all-reduce; on one placement of ranks."""

    where: Placement
    points: Mapping[Choice, Sequence[tuple[int, float]]]

    def seconds(self, choice: Choice, num_bytes: float) -> float:
        return seconds_between(self.points[choice], num_bytes)

    def fastest(self, num_bytes: float) -> Choice:
        return min(self.points, key=lambda choice: self.seconds(choice, num_bytes))


def read_table(path: Path, where: Placement) -> MeasuredTable:
    """Reads what a benchmark's record says about this placement; raises UsageError where that is not one thing."""
    try:
        found = list(_points(parse_json(read_regular(path))["rows"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is no record of all-reduces: {why}\n  a benchmark writes one\n{_FIX}") from error
    here = [(choice, size, seconds) for place, choice, size, seconds in found if place == (where.ranks, where.hosts)]
    named = f"{where.ranks} ranks on {where.hosts} {'host' if where.hosts == 1 else 'hosts'}"
    if not here:
        known = ", ".join(sorted({f"{ranks} on {hosts}" for (ranks, hosts), *_ in found})) or "none"
        raise UsageError(f"{path} has no all-reduces of {named}\n  it has those of ranks on hosts: {known}\n{_FIX}")
    points: dict[Choice, list[tuple[int, float]]] = {}
    for choice, size, seconds in sorted(here, key=lambda each: each[1]):
        points.setdefault(choice, []).append((size, seconds))
    for choice, line in points.items():
        if len({size for size, _ in line}) < len(line):
            rule = f"a table is of one kind of link\n{_FIX}"
            raise UsageError(f"{path} says more than once how long {choice} takes for one size on {named}\n  {rule}")
    return MeasuredTable(where=where, points=points)


def _points(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[int, int], Choice, int, float]]:
    """Reads rows of ``bench/links.py``; and of ``paceline bench comm`` those over Gloo, on one host."""
    for row in rows:
        if row.get("part") is not None:
            if row["part"] == "all_reduce" and row["arm"] in _CHOICES:
                yield (row["ranks"], row["hosts"]), row["arm"], row["size_bytes"], row["median_ms"] / 1e3
        elif row["backend"] == "gloo" and row["algorithm"] in _CHOICES and row["algorithm"] != "hierarchical":
            yield (row["ranks"], 1), row["algorithm"], row["bytes"], row["median_us"] / 1e6


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
        return tuple(child for child, parent in enumerate(self.parents) if parent == rank)


def make_tree(parents: tuple[int, ...]) -> Tree:
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

    In the first, ranks are numbered from left to right. The second is its mirror image where that swaps leaves and
    others (an even number of ranks), and else the first moved on by one rank.
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
            halves += [(first, middle), (middle, last)]
            for rank in range(first, middle):  # of the first half, which is larger by one at most
                partner = min(rank - first + middle, last - 1)
                exchanges.append(SliceMessage(rank, partner, middle, last))
                if rank - first + middle < last:
                    exchanges.append(SliceMessage(partner, rank, first, middle))
        rounds.append(tuple(exchanges))
        groups = halves
    return tuple(rounds)


def _parent(place: int, size: int) -> int:
    """Returns the parent of a place (from 1) of a binary tree numbered from left to right; 0 for its root.

    The zeros that a place ends with are its height. A parent beyond the last place is replaced by the nearest there.
    """
    bit = place & -place
    if place == 1 << (size.bit_length() - 1):
        return 0
    above = (place ^ bit) | (bit << 1)
    while above > size:
        bit <<= 1
        above = (above ^ bit) | (bit << 1)
    return above
