"""Collectives as rounds of messages: what one rank sends and receives, as data that knows no tensor and no backend.

    ring           N-1 rounds: pass a slice on, add one's own to the slice that comes; N-1 more to spread the sums
    halving        ceil(log2 N) rounds: see ``cluster/costs.py``; the same backwards to spread the sums
    tree           up to the root, adding; down again, copying
    hierarchical   inside a host everyone sends slice j to its j-th rank; the j-th ranks of all hosts reduce that slice
                   among themselves, so that every rank's link is used; inside the host everyone gets it back

A message has the same round on both sides: ranks that go through their rounds in order never wait in a circle, and NCCL
can match messages by order. Every element is summed up by one rank, in a fixed order, and then only copied: all ranks
end with the same bits.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from paceline.cluster.costs import MeasuredTable, Placement, Tree, halving, read_table
from paceline.comm.base import Communicator
from paceline.comm.objects import ask_first_rank, gather_objects
from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks of a group by host: each host's in rank order, hosts by their first rank."""

    hosts: tuple[tuple[int, ...], ...]

    @property
    def placement(self) -> Placement:
        """The topology as the cost formulas know it; hosts of different sizes count as one."""
        ranks, hosts = sum(len(host) for host in self.hosts), len(self.hosts)
        return Placement(ranks=ranks, hosts=hosts if ranks % hosts == 0 else 1)

    def restrict(self, ranks: Sequence[int]) -> Topology:
        """Returns the topology of a subgroup: a member's number is its place in ``ranks``."""
        host_of = {rank: number for number, host in enumerate(self.hosts) for rank in host}
        return from_names([host_of[rank] for rank in ranks])


def from_names(names: Sequence[object]) -> Topology:
    """Returns the topology of ranks whose hosts have these names, in rank order."""
    hosts: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return Topology(hosts=tuple(tuple(host) for host in hosts.values()))


def state_topology(num_ranks: int, node_ranks: int) -> Topology:
    """Returns the topology of equal hosts, one after another; raises UsageError unless the ranks fill whole ones."""
    if node_ranks < 1 or num_ranks % node_ranks:
        fix = "give a number of ranks per host that divides the ranks, or leave it out and let the hosts be found"
        raise UsageError(f"{num_ranks} ranks on hosts of {node_ranks}: every host runs as many ranks\n  {fix}")
    return from_names([rank // node_ranks for rank in range(num_ranks)])


def detect_topology(comm: Communicator, node_ranks: int | None = None) -> Topology:
    """Asks every rank of a group for its host. All ranks call it; two small all-gathers.

    ``node_ranks`` is how many ranks the launcher says share this one's host. It goes before the names, as hosts may
    have one name, where all ranks hear the same: others are on hosts of different sizes.
    """
    known = gather_objects(comm, (socket.gethostname(), node_ranks))
    if len({size for _, size in known}) == 1 and node_ranks and comm.size % node_ranks == 0:
        return state_topology(comm.size, node_ranks)
    return from_names([name for name, _ in known])


def share_table(path: str, comm: Communicator, topology: Topology) -> MeasuredTable:
    """Returns the measured all-reduces of such a group, read by rank 0 for all, or raises UsageError on all."""
    try:
        return ask_first_rank(comm, lambda: read_table(Path(path), topology.placement))
    except UsageError as error:
        raise UsageError(f"comm.algorithm_table: {error}") from error


ElementRange: TypeAlias = tuple[int, int]  # the first element, and one past the last
_LONG = 2**15  # elements of a message whose bytes take longer than getting going


@dataclass(frozen=True, slots=True)
class Message:
    """Elements ``start`` to ``stop`` (exclusive), to or from rank ``peer``."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a rank does at once. With ``is_total`` its sums are those of all ranks, and not of some."""

    sends: tuple[Message, ...] = ()
    sums: tuple[Message, ...] = ()  # received, and added to what is there
    copies: tuple[Message, ...] = ()  # received in place of what is there
    is_total: bool = False


def cut(span: ElementRange, parts: int) -> list[ElementRange]:
    """Cuts a span into ``parts`` that differ in length by one at most."""
    start, length = span[0], span[1] - span[0]
    return [(start + length * part // parts, start + length * (part + 1) // parts) for part in range(parts)]


def ring_reduce_scatter(rank: int, slices: Sequence[ElementRange]) -> list[Round]:
    """Sums slice r on rank r: it starts at the next rank and comes round."""
    size = len(slices)
    after, before = (rank + 1) % size, (rank - 1) % size
    return [
        Round(
            sends=(Message(after, *slices[(rank - 1 - step) % size]),),
            sums=(Message(before, *slices[(rank - 2 - step) % size]),),
            is_total=step == size - 2,
        )
        for step in range(size - 1)
    ]


def ring_all_gather(rank: int, slices: Sequence[ElementRange]) -> list[Round]:
    """Spreads slice r of rank r: everyone passes on what came last, as in the sums but one slice further."""
    rounds = ring_reduce_scatter(rank, [*slices[1:], slices[0]])
    return [Round(sends=each.sends, copies=each.sums) for each in rounds]


def halving_reduce_scatter(rank: int, slices: Sequence[ElementRange]) -> list[Round]:
    """Sums slice r on rank r by recursive halving. The slices lie one after another."""
    size, rounds = len(slices), []
    exchanges = halving(size)
    last = max((number for number, each in enumerate(exchanges) if any(e.receiver == rank for e in each)), default=-1)
    for number, each in enumerate(exchanges):
        sends = [Message(e.receiver, slices[e.first][0], slices[e.last - 1][1]) for e in each if e.sender == rank]
        sums = [Message(e.sender, slices[e.first][0], slices[e.last - 1][1]) for e in each if e.receiver == rank]
        rounds.append(Round(sends=tuple(sends), sums=tuple(sums), is_total=number == last))
    return rounds


def doubling_all_gather(rank: int, slices: Sequence[ElementRange]) -> list[Round]:
    """Spreads slice r of rank r: halving backwards, with everything copied that was added there."""
    return _spread(reversed(halving_reduce_scatter(rank, slices)))


def tree_reduce(rank: int, tree: Tree, span: ElementRange) -> list[Round]:
    """Sums a span on the root. A rank that is d below it sends in round height - d."""
    rounds, depth = [Round()] * tree.height, tree.depths[rank]
    if sums := tuple(Message(child, *span) for child in tree.children(rank)):
        rounds[tree.height - depth - 1] = Round(sums=sums, is_total=depth == 0)
    if depth:
        rounds[tree.height - depth] = Round(sends=(Message(tree.parents[rank], *span),))
    return rounds


def tree_broadcast(rank: int, tree: Tree, span: ElementRange) -> list[Round]:
    """Spreads a span from the root: the sums backwards. A rank that is d below it receives in round d - 1."""
    return _spread(reversed(tree_reduce(rank, tree, span)))


def hierarchical_all_reduce(rank: int, topology: Topology, span: ElementRange) -> list[Round]:
    """Reduces inside hosts, across them, and spreads inside. Ranks that another host has no mate for own no slice."""
    num_slices = min(len(host) for host in topology.hosts)
    slices = cut(span, num_slices)
    host = next(each for each in topology.hosts if rank in each)
    place, size = host.index(rank), len(host)
    # Slice j goes to the j-th rank of the host, all at once: each starts with its neighbour.
    others = [(place + step) % size for step in range(1, size)]
    sends = tuple(Message(host[other], *slices[other]) for other in others if other < num_slices)
    mates = [mate for mate in host if mate != rank] if place < num_slices else []
    inside = Round(sends=sends, sums=tuple(Message(mate, *slices[place]) for mate in mates))
    if len(topology.hosts) == 1:
        across = []
        inside = replace(inside, is_total=True)
    elif place >= num_slices:
        across = [Round()] * len(_all_reduce_across(0, len(topology.hosts), slices[0]))
    else:
        owners = [each[place] for each in topology.hosts]
        across = _among(owners, _all_reduce_across(owners.index(rank), len(owners), slices[place]))
    return [inside, *across, *_spread([inside])]


def hierarchical_reduce_scatter(rank: int, topology: Topology, slices: Sequence[ElementRange]) -> list[Round]:
    """Sums slice r on rank r: the slices of all j-th ranks on the j-th of each host, then among those in a ring."""
    owners = _counterparts(rank, topology)
    across = ring_reduce_scatter(owners.index(rank), [slices[each] for each in owners])
    return _inside(rank, topology, slices) + _among(owners, across)


def hierarchical_all_gather(rank: int, topology: Topology, slices: Sequence[ElementRange]) -> list[Round]:
    """Spreads slice r of rank r: across hosts, among their j-th ranks, then inside. Hosts have as many ranks each."""
    owners = _counterparts(rank, topology)
    across = ring_all_gather(owners.index(rank), [slices[each] for each in owners])
    return _among(owners, across) + _spread(_inside(rank, topology, slices))


def _inside(rank: int, topology: Topology, slices: Sequence[ElementRange]) -> list[Round]:
    """Sums the slices of one host after another inside the rank's own, each on the rank that has its owner's place."""
    host = next(each for each in topology.hosts if rank in each)
    place = host.index(rank)
    return [
        Round(
            sends=tuple(Message(mate, *slices[there[number]]) for number, mate in enumerate(host) if mate != rank),
            sums=tuple(Message(mate, *slices[there[place]]) for mate in host if mate != rank),
            is_total=len(topology.hosts) == 1,
        )
        for there in topology.hosts
    ]


def _spread(rounds: Iterable[Round]) -> list[Round]:
    """Turns rounds that add up into rounds that copy the sums the other way."""
    return [Round(sends=each.sums, copies=each.sends) for each in rounds]


def _counterparts(rank: int, topology: Topology) -> list[int]:
    place = next(each.index(rank) for each in topology.hosts if rank in each)
    return [each[place] for each in topology.hosts]


def _all_reduce_across(rank: int, size: int, span: ElementRange) -> list[Round]:
    """Reduces among the hosts: by halving where it is even; long messages in a ring, which keeps its partners."""
    slices = cut(span, size)
    if size & (size - 1) or (span[1] - span[0]) // size >= _LONG:
        return ring_reduce_scatter(rank, slices) + ring_all_gather(rank, slices)
    return halving_reduce_scatter(rank, slices) + doubling_all_gather(rank, slices)


def _among(members: Sequence[int], rounds: list[Round]) -> list[Round]:
    """Renames peers: from their numbers among ``members`` to their ranks."""

    def rename(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(replace(message, peer=members[message.peer]) for message in messages)

    return [replace(r, sends=rename(r.sends), sums=rename(r.sums), copies=rename(r.copies)) for r in rounds]
