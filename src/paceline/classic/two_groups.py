"""An average over two groups: of the ranks inside a host, and of those that stand for the hosts.

For B bytes, H hosts of L ranks, what a rank sends inside a host, and what a host sends across:

    every rank has a group across    2 B (L-1)/L inside,  2 B (H-1)/H across, on the links of all its ranks
    one rank of a host has           3 B at most inside,  2 B (H-1)/H across, on the link of that rank

The first reduces and scatters inside, averages each slice across, and gathers inside; the second averages inside, then
across, and hands the result round. Both end with the same bits on every rank. ``comm/algorithms/communicator.py`` does
the same on one group whose hosts it knows; this is for groups that are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from paceline.comm.base import Communicator, Work
from paceline.comm.objects import gather_objects
from paceline.errors import UsageError
from paceline.shards import round_up

STAGES = 4  # of a piece at most: inside, across, inside again, there


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoGroups:
    """The groups of one rank. ``leader`` is who talks across for its host; None: everyone does, each with a slice.

    ``weight`` makes hosts count by their ranks: 1 where all have as many.
    """

    inside: Communicator
    across: Communicator | None
    leader: int | None
    weight: float

    def average(self, piece: torch.Tensor) -> Iterator[None]:
        """Puts the average into a piece, stage by stage."""
        return _by_slices(self, piece) if self.leader is None else _by_leader(self, piece)


def connect_groups(inside: Communicator, across: Communicator | None) -> TwoGroups:
    """Learns how the groups lie. All ranks of all hosts call it; some small gathers.

    Raises UsageError on every rank of a host where a part of its ranks has a group across, and on all ranks where hosts
    of different sizes give one to every rank: then no slice is averaged over all hosts.
    """
    has_group = gather_objects(inside, across is not None)
    if sum(has_group) != 1 and not all(has_group):
        raise UsageError(
            f"{sum(has_group)} of the {inside.size} ranks of a host have a group across hosts\n"
            "  one of them stands for its host, or every one does with a slice\n"
            "  make the groups across of one rank of each host, or of the first ranks, the second ranks, and so on"
        )
    # A host of one rank fits either way.
    mine = _Host(size=inside.size, is_sliced=inside.size > 1 and all(has_group))
    told = gather_objects(inside, None if across is None else gather_objects(across, mine))
    seen = [hosts for hosts in told if hosts is not None]
    is_even = all(hosts == seen[0] for hosts in seen) and len(set(seen[0])) == 1
    if any(host.is_sliced for hosts in seen for host in hosts) and not is_even:
        sizes = sorted({host.size for hosts in seen for host in hosts})
        raise UsageError(
            f"hosts of {sizes} ranks, with a group across for every rank\n"
            "  where every rank of a host averages its slice over all hosts, all hosts have as many ranks, and do so\n"
            "  give one rank of each host a group across, and None to the others"
        )
    if mine.is_sliced:
        return TwoGroups(inside=inside, across=across, leader=None, weight=1.0)
    weight = inside.size * len(seen[0]) / sum(host.size for host in seen[0])
    return TwoGroups(inside=inside, across=across, leader=has_group.index(True), weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    size: int
    is_sliced: bool  # each of its ranks has a group across


def once(start: Callable[[], Work]) -> Iterator[None]:
    """Goes the way of a piece that one operation brings there, in stages: it starts, and it is there."""
    work = start()
    yield
    work.wait()


def run_stage(pieces: Iterable[Iterator[None]]) -> None:
    """Takes pieces that go side by side one stage on; those that are there stay so."""
    for piece in pieces:
        next(piece, None)


def _by_leader(groups: TwoGroups, piece: torch.Tensor) -> Iterator[None]:
    """Averages a piece inside the host, lets one rank average that across, and hands it round."""
    assert groups.leader is not None
    if groups.weight != 1.0:
        piece.mul_(groups.weight)
    yield from once(partial(groups.inside.all_reduce, piece, "avg"))
    if groups.across is not None:
        yield from once(partial(groups.across.all_reduce, piece, "avg"))
    yield from once(partial(groups.inside.broadcast, piece, groups.leader))


def _by_slices(groups: TwoGroups, piece: torch.Tensor) -> Iterator[None]:
    """Averages a piece inside the host, a slice on each rank, and that across; then gathers the slices."""
    assert groups.across is not None
    length = round_up(piece.numel(), groups.inside.size)
    whole, own = piece, piece.new_empty(length // groups.inside.size)
    if length != piece.numel():
        whole = piece.new_zeros(length)
        whole[: piece.numel()] = piece
    yield from once(partial(groups.inside.reduce_scatter, own, whole, "avg"))
    yield from once(partial(groups.across.all_reduce, own, "avg"))
    yield from once(partial(groups.inside.all_gather, whole, own))
    if whole is not piece:
        piece.copy_(whole[: piece.numel()])
