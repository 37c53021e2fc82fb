"""What an operation between ranks costs on a cluster's wires.

    GPUs                    NCCL's own cost model (cluster/nccl.py)
    hosts, no cluster       the least of ring, tree and halving (cluster/costs.py): alpha + beta B a message
    a measured host         the all-reduces that were timed there; a gather or a scatter takes half
    algorithms of our own   the formula of that algorithm (cluster/costs.py), whatever the cluster

Ranks fill a node before the next one. A broadcast of B bytes takes what an all-gather of B does: every rank receives
them once. A barrier is an all-reduce of one number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeAlias

from paceline.cluster import costs
from paceline.cluster.costs import Placement, Wire, Wires
from paceline.cluster.devices import Cluster
from paceline.cluster.measured import seconds_between
from paceline.cluster.nccl import Collective, Group, collective_seconds
from paceline.errors import UsageError

WireCost: TypeAlias = Callable[[str, int, tuple[int, ...]], float]  # of a kind, bytes and the ranks of a group

_BARRIER_BYTES = 4
_NCCL_KINDS: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "broadcast": "all_gather",
    "barrier": "all_reduce",
    "all_to_all": "all_to_all",
    "send": "send",
    "recv": "send",
}


def wire_cost(cluster: Cluster | None, ranks: int, node_ranks: int | None = None) -> WireCost:
    """Returns what operations cost on ``cluster``, or between processes of hosts where there is none.

    Without a cluster ``node_ranks`` share a host; None: all do. Raises UsageError if the cluster has fewer devices
    than there are ranks.
    """
    if cluster is None:
        return partial(_host_cost, Wires(), node_ranks or ranks)
    if cluster.devices < ranks:
        raise UsageError(
            f"{ranks} ranks on {cluster.name}, which has {cluster.devices} devices\n"
            "  every rank has a device of its own\n"
            f"  give fewer ranks, or more of them: {-(-ranks // cluster.node.devices)}x {cluster.node.name}"
        )
    if cluster.device.is_cpu:
        formula = partial(_host_cost, _links(cluster), cluster.node.devices)
        measured = cluster.node.inside.all_reduce
        return partial(_measured_cost, formula, measured) if measured and cluster.nodes == 1 else formula
    return partial(_device_cost, cluster)


def algorithm_cost(cluster: Cluster, algorithm: str, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Returns the seconds of a collective that is made of messages. Raises UsageError for an unknown algorithm.

    A message between GPUs takes what NCCL's latency for one is; the network of a node is shared by those that leave it.
    """
    if algorithm not in costs.ALGORITHMS:
        known = ", ".join(costs.ALGORITHMS)
        raise UsageError(f"a collective by the algorithm {algorithm!r}\n  it is one of {known}\n  take one of these")
    links = _links(cluster)
    if not cluster.device.is_cpu:
        inside, across = (collective_seconds("send", 1.0, Group(2, nodes), cluster) for nodes in (1, 2))
        links = Wires(inside=replace(links.inside, alpha_s=inside), across=replace(links.across, alpha_s=across))
    return _algorithm_seconds(algorithm, kind, num_bytes, _placement(ranks, cluster.node.devices), links)


@cache
def _algorithm_seconds(algorithm: costs.Algorithm, kind: str, num_bytes: int, where: Placement, links: Wires) -> float:
    if kind == "all_reduce":
        return costs.all_reduce_seconds(algorithm, num_bytes, where, links)
    seconds = costs.broadcast_seconds if kind == "broadcast" else costs.scatter_seconds
    return seconds(algorithm, num_bytes, where, links)


def _links(cluster: Cluster) -> Wires:
    inside, across = cluster.node.inside, cluster.between
    near = Wire(alpha_s=inside.latency_s, bandwidth=inside.bandwidth * inside.efficiency)
    if across is None:
        return Wires(inside=near)
    return Wires(inside=near, across=Wire(alpha_s=across.latency_s, bandwidth=across.bandwidth * across.efficiency))


def _placement(ranks: tuple[int, ...], node_ranks: int) -> Placement:
    """Returns where a group is. Hosts of the formulas are equal: else as if all had what the fullest has."""
    by_host = Counter(rank // node_ranks for rank in ranks)
    return Placement(ranks=len(by_host) * max(by_host.values()), hosts=len(by_host))


def _device_cost(cluster: Cluster, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Returns the seconds of an operation of NCCL."""
    hosts = len({rank // cluster.node.devices for rank in ranks})
    size = _BARRIER_BYTES if kind == "barrier" else num_bytes
    return collective_seconds(_NCCL_KINDS[kind], float(size), Group(len(ranks), hosts), cluster)


def _host_cost(links: Wires, node_ranks: int, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Returns the seconds between processes that talk through a host's memory or a network."""
    return _host_seconds(kind, num_bytes, _placement(ranks, node_ranks), links)


def _measured_cost(
    formula: WireCost,
    points: Mapping[int, Sequence[tuple[int, float]]],
    kind: str,
    num_bytes: int,
    ranks: tuple[int, ...],
) -> float:
    """Returns the seconds on a host whose all-reduces were timed, by the nearest number of ranks."""
    if kind in ("send", "recv") or len(ranks) < 2:
        return formula(kind, num_bytes, ranks)
    known = min(points, key=lambda count: (abs(count - len(ranks)), count))
    seconds = seconds_between(points[known], _BARRIER_BYTES if kind == "barrier" else num_bytes)
    seconds *= (1 - 1 / len(ranks)) / (1 - 1 / known)  # by the bytes that each rank sends
    return seconds if kind in ("all_reduce", "barrier") else seconds / 2


@cache
def _host_seconds(kind: str, num_bytes: int, where: Placement, links: Wires) -> float:
    if kind in ("send", "recv"):
        return (links.inside if where.hosts == 1 else links.across).seconds(num_bytes)
    if kind in ("all_reduce", "barrier"):
        size = _BARRIER_BYTES if kind == "barrier" else num_bytes
        return costs.all_reduce_seconds(costs.fastest_all_reduce(size, where, links), size, where, links)
    if kind == "broadcast":
        return costs.broadcast_seconds(costs.fastest_broadcast(num_bytes, where, links), num_bytes, where, links)
    return costs.scatter_seconds(costs.fastest_scatter(num_bytes, where, links), num_bytes, where, links)
