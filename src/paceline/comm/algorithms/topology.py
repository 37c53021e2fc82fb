"""Which ranks share a host (stated, or found by asking every rank), and what was measured for such a group."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.costs import Placement
from paceline.cluster.measured import MeasuredTable, read_table
from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object, gather_objects
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
        raise UsageError(
            f"{num_ranks} ranks on hosts of {node_ranks}: every host runs as many ranks\n"
            "  give a number of ranks per host that divides the ranks, or leave it out and let the hosts be found"
        )
    return from_names([rank // node_ranks for rank in range(num_ranks)])


def detect_topology(comm: Communicator, node_ranks: int | None = None) -> Topology:
    """Asks every rank of a group for its host. All ranks call it; two small all-gathers.

    ``node_ranks`` is how many ranks the launcher says share this one's host. It goes before the names where all ranks
    hear the same, as hosts may have one name; ranks that hear otherwise are on hosts of different sizes.
    """
    known = gather_objects(comm, (socket.gethostname(), node_ranks))
    sizes = {size for _, size in known}
    if len(sizes) == 1 and node_ranks and comm.size % node_ranks == 0:
        return state_topology(comm.size, node_ranks)
    return from_names([name for name, _ in known])


def share_table(path: str, comm: Communicator, topology: Topology) -> MeasuredTable:
    """Returns the measured all-reduces of such a group, read by rank 0, so that all ranks choose alike.

    All ranks call it. Raises UsageError on every rank where the record cannot be read, or has no such group.
    """
    found: MeasuredTable | str | None = None
    if comm.rank == 0:
        try:
            found = read_table(Path(path), topology.placement)
        except UsageError as error:
            found = str(error)
    found = broadcast_object(comm, found)
    if not isinstance(found, MeasuredTable):
        raise UsageError(f"comm.algorithm_table: {found}")
    return found
