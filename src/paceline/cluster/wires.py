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
from typing import TypeAlias, cast

from paceline.cluster import costs
from paceline.cluster.costs import Placement, Wire, Wires, seconds_between
from paceline.cluster.devices import Cluster
from paceline.cluster.nccl import Collective, Group, collective_seconds
from paceline.errors import UsageError

WireCost: TypeAlias = Callable[[str, int, tuple[int, ...]], float]  # of a kind, bytes and the ranks of a group

_BARRIER_BYTES = 4
_ALL_REDUCE = (costs.all_reduce_seconds, costs.fastest_all_reduce)
_BROADCAST = (costs.broadcast_seconds, costs.fastest_broadcast)
_SCATTER = (costs.scatter_seconds, costs.fastest_scatter)


def wire_cost(cluster: Cluster | None, ranks: int, node_ranks: int | None = None) -> WireCost:
    """Returns what operations cost on ``cluster``, or between processes of hosts where there is none.

    Without a cluster ``node_ranks`` share a host; None: all do. Raises UsageError if the cluster has fewer devices
    than there are ranks.
    """
    if cluster is None:
        return partial(_cost, partial(_host_cost, Wires(), node_ranks or ranks))
    if cluster.devices < ranks:
        raise UsageError(
            f"{ranks} ranks on {cluster.name}, which has {cluster.devices} devices\n"
            "  every rank has a device of its own\n"
            f"  give fewer ranks, or more of them: {-(-ranks // cluster.node.devices)}x {cluster.node.name}"
        )
    if not cluster.device.is_cpu:
        return partial(_cost, partial(_device_cost, cluster))
    formula = partial(_host_cost, _links(cluster), cluster.node.devices)
    measured = cluster.node.inside.all_reduce
    return partial(_cost, partial(_measured_cost, formula, measured) if measured and cluster.nodes == 1 else formula)


def over_backend(cluster: Cluster, backend: str) -> Cluster:
    """Returns a cluster as ranks see it that talk through ``comm.backend``.

    Raises UsageError for a backend that does not work there, or whose speed there nobody measured.
    """
    problem = _backend_problem(cluster, backend)
    if problem:
        raise UsageError(f"comm.backend = {backend} on {cluster.name}\n  {problem}\n  set comm.backend = auto")
    if backend == "gloo" and cluster.node.gloo is not None:
        return replace(cluster, node=replace(cluster.node, inside=cluster.node.gloo))
    return cluster


def _backend_problem(cluster: Cluster, backend: str) -> str:
    node, is_cpu = cluster.node, cluster.device.is_cpu
    problems = {
        "nccl moves bytes between GPUs only": backend == "nccl" and is_cpu,
        "Gloo takes what GPUs send through their hosts, which was not measured": backend == "gloo" and not is_cpu,
        f"{node.name} was not measured over Gloo": backend == "gloo" and is_cpu and node.gloo is None,
        "shared memory joins CPU ranks of one host": backend == "shared_memory" and not (is_cpu and cluster.nodes == 1),
        f"the ranks of {node.name} talk over {node.inside.name}": backend == "shared_memory"
        and node.inside.kind != "shared_memory",
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


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
    return _formula_seconds(kind, num_bytes, _placement(ranks, cluster.node.devices), links, algorithm)


def _links(cluster: Cluster) -> Wires:
    inside, across = cluster.node.inside, cluster.between
    near = Wire(alpha_s=inside.latency_s, bandwidth=inside.reached)
    if across is None:
        return Wires(inside=near)
    return Wires(inside=near, across=Wire(alpha_s=across.latency_s, bandwidth=across.reached))


def _placement(ranks: tuple[int, ...], node_ranks: int) -> Placement:
    """Returns where a group is. Hosts of the formulas are equal: else as if all had what the fullest has."""
    by_host = Counter(rank // node_ranks for rank in ranks)
    return Placement(ranks=len(by_host) * max(by_host.values()), hosts=len(by_host))


def _cost(price: WireCost, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Prices an operation as what it is on the wire: a barrier as an all-reduce of one number, a receive as a send."""
    if kind == "barrier":
        return price("all_reduce", _BARRIER_BYTES, ranks)
    return price("send" if kind == "recv" else kind, num_bytes, ranks)


def _device_cost(cluster: Cluster, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Returns the seconds of an operation of NCCL."""
    hosts = len({rank // cluster.node.devices for rank in ranks})
    priced = cast(Collective, "all_gather" if kind == "broadcast" else kind)
    return collective_seconds(priced, float(num_bytes), Group(len(ranks), hosts), cluster)


def _host_cost(links: Wires, node_ranks: int, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Returns the seconds between processes that talk through a host's memory or a network."""
    where = _placement(ranks, node_ranks)
    if kind == "send":
        return (links.inside if where.hosts == 1 else links.across).seconds(num_bytes)
    return _formula_seconds(kind, num_bytes, where, links)


def _measured_cost(
    formula: WireCost,
    points: Mapping[int, Sequence[tuple[int, float]]],
    kind: str,
    num_bytes: int,
    ranks: tuple[int, ...],
) -> float:
    """Returns the seconds on a host whose all-reduces were timed, by the nearest number of ranks."""
    if kind == "send" or len(ranks) < 2:
        return formula(kind, num_bytes, ranks)
    known = min(points, key=lambda count: (abs(count - len(ranks)), count))
    seconds = seconds_between(points[known], num_bytes)
    seconds *= (1 - 1 / len(ranks)) / (1 - 1 / known)  # by the bytes that each rank sends
    return seconds if kind == "all_reduce" else seconds / 2


@cache
def _formula_seconds(
    kind: str, num_bytes: int, where: Placement, links: Wires, algorithm: costs.Algorithm | None = None
) -> float:
    """Returns the seconds of a collective by an algorithm; None: by the fastest."""
    seconds, fastest = _ALL_REDUCE if kind == "all_reduce" else _BROADCAST if kind == "broadcast" else _SCATTER
    return seconds(algorithm or fastest(num_bytes, where, links), num_bytes, where, links)
