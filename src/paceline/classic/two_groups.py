"""An average over two groups: of the ranks inside a host, and of those that stand for the hosts.

For B bytes, H hosts of L ranks, what a rank sends inside a host, and what a host sends across:

    every rank has a group across    2 B (L-1)/L inside,  2 B (H-1)/H across, on the links of all its ranks
    one rank of a host has           3 B at most inside,  2 B (H-1)/H across, on the link of that rank

The first reduces and scatters inside, averages each slice across, and gathers inside; the second averages inside, then
across, and hands the result round. Both end with the same bits on every rank. ``comm/algorithms/communicator.py`` does
the same on one group whose hosts it knows; this is for groups that are there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.comm.base import DONE, Communicator, Work
from paceline.comm.objects import gather_objects
from paceline.errors import UsageError
from paceline.shards import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoGroups:
    """The groups of one rank. ``leader`` is who talks across for its host; None: everyone does, each with a slice.

    ``weight`` makes hosts count by their ranks: 1 where all have as many.
    """

    inside: Communicator
    across: Communicator | None
    leader: int | None
    weight: float


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


class TwoGroupAverage:
    """An average on its way: every piece goes through its stages, side by side where that is wanted."""

    def __init__(self, groups: TwoGroups, pieces: Sequence[torch.Tensor], *, is_overlapped: bool) -> None:
        kind = _BySlices if groups.leader is None else _ByLeader
        self._pieces: list[_ByLeader | _BySlices] = [kind(groups, piece) for piece in pieces]
        self._is_overlapped = is_overlapped
        self._is_done = False
        if is_overlapped:
            for piece in self._pieces:
                piece.reduce_inside()

    def wait(self) -> None:
        """Puts the average into the pieces. Safe to call twice."""
        if self._is_done:
            return
        self._is_done = True
        if self._is_overlapped:
            self._finish(self._pieces)
            return
        for piece in self._pieces:
            piece.reduce_inside()
            self._finish([piece])

    def _finish(self, pieces: Sequence[_ByLeader | _BySlices]) -> None:
        for piece in pieces:
            piece.reduce_across()
        for piece in pieces:
            piece.spread_inside()
        for piece in pieces:
            piece.finish()


class _ByLeader:
    """A piece whose host's average one rank carries."""

    def __init__(self, groups: TwoGroups, piece: torch.Tensor) -> None:
        self._groups = groups
        self._piece = piece
        self._work: Work = DONE

    def reduce_inside(self) -> None:
        """Averages inside the host."""
        if self._groups.weight != 1.0:
            self._piece.mul_(self._groups.weight)
        self._work = self._groups.inside.all_reduce(self._piece, "avg")

    def reduce_across(self) -> None:
        """Averages across hosts, on the leader."""
        self._work.wait()
        self._work = DONE if self._groups.across is None else self._groups.across.all_reduce(self._piece, "avg")

    def spread_inside(self) -> None:
        """Hands the result round."""
        self._work.wait()
        assert self._groups.leader is not None
        self._work = self._groups.inside.broadcast(self._piece, self._groups.leader)

    def finish(self) -> None:
        """Waits for it."""
        self._work.wait()


class _BySlices:
    """A piece of which every rank of a host carries a slice."""

    def __init__(self, groups: TwoGroups, piece: torch.Tensor) -> None:
        self._groups = groups
        self._piece = piece
        length = round_up(piece.numel(), groups.inside.size)
        self._whole = piece if length == piece.numel() else piece.new_zeros(length)
        self._slice = piece.new_empty(length // groups.inside.size)
        self._work: Work = DONE

    def reduce_inside(self) -> None:
        """Averages inside the host, a slice on each rank."""
        if self._whole is not self._piece:
            self._whole[: self._piece.numel()] = self._piece
        self._work = self._groups.inside.reduce_scatter(self._slice, self._whole, "avg")

    def reduce_across(self) -> None:
        """Averages the slice across hosts."""
        self._work.wait()
        assert self._groups.across is not None
        self._work = self._groups.across.all_reduce(self._slice, "avg")

    def spread_inside(self) -> None:
        """Gathers the slices."""
        self._work.wait()
        self._work = self._groups.inside.all_gather(self._whole, self._slice)

    def finish(self) -> None:
        """Waits for them."""
        self._work.wait()
        if self._whole is not self._piece:
            self._piece.copy_(self._whole[: self._piece.numel()])
