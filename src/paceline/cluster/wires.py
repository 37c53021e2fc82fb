"""What an operation between ranks costs on a cluster's wires.

    GPUs                    NCCL's own cost model (2.30), by which it chooses an algorithm and a protocol: see below
    hosts, no cluster       the least of ring, tree and halving (cluster/costs.py): alpha + beta B a message
    a measured host         the all-reduces that were timed there; a gather or a scatter takes half
    algorithms of our own   their formulas (cluster/costs.py): one ring, over one card; NCCL has a ring for each card

Ranks fill a node before the next one. A broadcast of B bytes takes what an all-gather of B does: every rank receives
them once. A barrier is an all-reduce of one number.

NCCL: for B bytes on n ranks of some nodes, time = latency + B / algbw, and the pair with the least time is taken.

    steps              all-reduce 2 (n-1), reduce-scatter and all-gather n-1
    algbw, ring        busbw n / steps;   protocols: LL min(llMax, busbw/2), LL128 0.92 busbw, Simple busbw
    algbw, tree        min(0.92 busbw, channels x perChannel) / 2;   LL at most min(busbw/3.8, llMax); LL128 x 7/9 on
                       one node, 120/128 on more
    algbw, NVLS        what the switch reaches, all-reduce alone (measured where the catalog has it)
    latency, ring      base + (steps - inter) max(intra, overhead) + inter interLat,  inter = 2 (nodes-1) or nodes-1
    latency, tree      base + 2 ((n/nodes - 1) intra + log2(nodes) inter)

B is the whole (unsharded) buffer. The ring's bus bandwidth inside a node is that of the catalog, measured by number of
devices; across nodes a group has the share of its node's network that its ranks there have of the node's devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Literal, TypeAlias, cast

from paceline.cluster import costs
from paceline.cluster.costs import Placement, Wire, Wires, seconds_between
from paceline.cluster.devices import Cluster
from paceline.errors import UsageError

WireCost: TypeAlias = Callable[[str, int, tuple[int, ...]], float]  # of a kind, bytes and the ranks of a group

_BARRIER_BYTES = 4
_ALL_REDUCE = (costs.all_reduce_seconds, costs.fastest_all_reduce)
_BROADCAST = (costs.broadcast_seconds, costs.fastest_broadcast)
_SCATTER = (costs.scatter_seconds, costs.fastest_scatter)


def wire_cost(cluster: Cluster | None, ranks: int, node_ranks: int | None = None) -> WireCost:
    """Returns what operations cost on ``cluster``; without one, between processes, ``node_ranks`` of them on a host."""
    if cluster is None:
        return partial(_cost, partial(_host_cost, Wires(), node_ranks or ranks))
    if cluster.devices < ranks:
        rule = "every rank has a device of its own"
        fix = f"give fewer ranks, or more of them: {-(-ranks // cluster.node.devices)}x {cluster.node.name}"
        raise UsageError(f"{ranks} ranks on {cluster.name}, which has {cluster.devices} devices\n  {rule}\n  {fix}")
    if not cluster.device.is_cpu:
        return partial(_cost, partial(_device_cost, cluster))
    formula = partial(_host_cost, _links(cluster), cluster.node.devices)
    measured = cluster.node.inside.all_reduce
    return partial(_cost, partial(_measured_cost, formula, measured) if measured and cluster.nodes == 1 else formula)


def over_backend(cluster: Cluster, backend: str) -> Cluster:
    """Returns a cluster as ranks see it that talk through ``comm.backend``. Raises UsageError for one not known."""
    node, is_cpu = cluster.node, cluster.device.is_cpu
    problems = {
        "nccl moves bytes between GPUs only": backend == "nccl" and is_cpu,
        "Gloo takes what GPUs send through their hosts, which was not measured": backend == "gloo" and not is_cpu,
        f"{node.name} was not measured over Gloo": backend == "gloo" and is_cpu and node.gloo is None,
        "shared memory joins CPU ranks of one host": backend == "shared_memory" and not (is_cpu and cluster.nodes == 1),
        f"the ranks of {node.name} talk over {node.inside.name}": backend == "shared_memory"
        and node.inside.kind != "shared_memory",
    }
    if problem := next((each for each, is_there in problems.items() if is_there), ""):
        raise UsageError(f"comm.backend = {backend} on {cluster.name}\n  {problem}\n  set comm.backend = auto")
    if backend == "gloo" and node.gloo is not None:
        return replace(cluster, node=replace(node, inside=node.gloo))
    return cluster


def algorithm_cost(cluster: Cluster, algorithm: str, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Returns the seconds of a collective that is made of messages. Raises UsageError for an unknown algorithm."""
    if algorithm not in costs.ALGORITHMS:
        known = ", ".join(costs.ALGORITHMS)
        raise UsageError(f"a collective by the algorithm {algorithm!r}\n  it is one of {known}\n  take one of these")
    links = _links(cluster)
    if not cluster.device.is_cpu:
        # A message between GPUs takes NCCL's latency for one.
        inside, across = (collective_seconds("send", 1.0, Group(2, nodes), cluster) for nodes in (1, 2))
        near, far = replace(links.inside, alpha_s=inside), replace(links.across, alpha_s=across)
        links = replace(links, inside=near, across=far)
    return _formula_seconds(kind, num_bytes, _placement(ranks, cluster.node.devices), links, algorithm)


def _links(cluster: Cluster) -> Wires:
    inside, across = cluster.node.inside, cluster.between
    near = Wire(alpha_s=inside.latency_s, bandwidth=inside.reached)
    if across is None:
        return Wires(inside=near)
    far = Wire(alpha_s=across.latency_s, bandwidth=across.reached)
    return Wires(inside=near, across=far, cards=min(across.cards, cluster.node.devices))


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
    seconds, fastest = _ALL_REDUCE if kind == "all_reduce" else _BROADCAST if kind == "broadcast" else _SCATTER
    return seconds(algorithm or fastest(num_bytes, where, links), num_bytes, where, links)


Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Protocol: TypeAlias = Literal["ll", "ll128", "simple"]
PROTOCOLS: tuple[Protocol, ...] = ("ll", "ll128", "simple")

_BASE_US = {"tree": {"ll": 6.8, "ll128": 14.0, "simple": 8.4}, "ring": {"ll": 6.6, "ll128": 14.0, "simple": 8.4}}
_INTRA_US = {
    ("nvlink", "tree"): {"ll": 0.6, "ll128": 1.25, "simple": 4.0},
    ("nvlink", "ring"): {"ll": 0.6, "ll128": 1.9, "simple": 3.4},
    ("pcie", "tree"): {"ll": 1.0, "ll128": 1.9, "simple": 4.0},
    ("pcie", "ring"): {"ll": 1.0, "ll128": 2.5, "simple": 5.7},
}
_NETWORK_US = {"tree": {"ll": 5.0, "ll128": 8.5, "simple": 14.0}, "ring": {"ll": 2.7, "ll128": 4.0, "simple": 14.0}}
_NVLS_US = 25.0
# GB/s of the LL protocol at most, on one node, on two, on more.
_LL_MOST = {
    "volta": (39.0, 39.0, 20.4),
    "turing": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "ada": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
_LL128_CHANNEL = {"volta": 20.0, "turing": 20.0, "ampere": 20.0, "ada": 20.0, "hopper": 36.7, "blackwell": 40.0}
_CHANNELS = {"volta": 12, "turing": 12, "ampere": 24, "ada": 24, "hopper": 24, "blackwell": 32}
_NVLS_EFFICIENCY = {"hopper": 0.85, "blackwell": 0.74}
# Beyond the nodes that one leaf of switches joins, flows of Ethernet meet on the links above: what a collective takes
# more with each doubling. Chosen by hand on published runs of 64 and 128 nodes (docs/prediction.md).
_CROWDING = {"roce": 0.05, "ethernet": 0.05}
_LEAF_NODES = 16


@dataclass(frozen=True, slots=True)
class Group:
    ranks: int
    nodes: int = 1

    @property
    def node_ranks(self) -> float:
        return self.ranks / self.nodes


def group_of(cluster: Cluster, ranks: int, stride: int = 1) -> Group:
    """Returns the group of ranks 0, stride, 2 stride ...: with a large stride they are on several nodes."""
    each = max(1, cluster.node.devices // stride)
    return Group(ranks, max(1, math.ceil(ranks / each)))


@lru_cache(maxsize=65536)
def collective_seconds(kind: Collective, num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Returns how long a collective takes in NCCL when nothing else runs. ``num_bytes`` are of the whole buffer."""
    if group.ranks <= 1 or num_bytes <= 0:
        return 0.0
    if kind == "send":
        return _send_seconds(num_bytes, group, cluster)
    if kind == "all_to_all":
        return _all_to_all_seconds(num_bytes, group, cluster)
    choices = [_ring_seconds(kind, num_bytes, group, cluster, protocol) for protocol in PROTOCOLS]
    if kind == "all_reduce":
        choices += [_tree_seconds(num_bytes, group, cluster, protocol) for protocol in PROTOCOLS]
        if group.nodes == 1 and cluster.node.inside.nvls and group.ranks > 2:
            choices.append(_nvls_seconds(num_bytes, group, cluster))
    return min(choices)


def bus_bandwidth(group: Group, cluster: Cluster) -> float:
    """Returns bytes per second that a ring moves: the link's inside a node, else the group's share of the network."""
    inside = cluster.node.inside.ring_bandwidth(max(2, math.ceil(group.node_ranks)))
    if group.nodes == 1 or cluster.between is None:
        return inside
    share = min(1.0, group.node_ranks / cluster.node.devices)
    crowd = 1 + _CROWDING.get(cluster.between.kind, 0.0) * math.log2(max(1.0, group.nodes / _LEAF_NODES))
    return min(inside, cluster.between.reached * share / crowd)


def _ll_most(group: Group, cluster: Cluster) -> float:
    rates = _LL_MOST.get(cluster.device.generation, _LL_MOST["ampere"])
    return rates[min(group.nodes - 1, 2)] * 1e9


def num_channels(cluster: Cluster) -> int:
    """Returns how many multiprocessors of a device NCCL has at work in a collective."""
    return _CHANNELS.get(cluster.device.generation, 24)


def _channel_most(cluster: Cluster) -> float:
    generation = cluster.device.generation
    return num_channels(cluster) * _LL128_CHANNEL.get(generation, 20.0) * 1e9


def _link_kind(cluster: Cluster) -> str:
    return "nvlink" if cluster.node.inside.kind == "nvlink" else "pcie"


def _ring_seconds(kind: Collective, num_bytes: float, group: Group, cluster: Cluster, protocol: Protocol) -> float:
    bus = bus_bandwidth(group, cluster)
    if protocol == "ll":
        bus = min(_ll_most(group, cluster), bus / 2)
    elif protocol == "ll128":
        bus = min(0.92 * bus, _channel_most(cluster))
    ways = 2 if kind == "all_reduce" else 1
    steps, inter = ways * (group.ranks - 1), ways * (group.nodes - 1)
    intra = _INTRA_US[_link_kind(cluster), "ring"][protocol]
    latency = _BASE_US["ring"][protocol] + (steps - inter) * intra + inter * _NETWORK_US["ring"][protocol]
    return latency * 1e-6 + num_bytes * steps / (group.ranks * bus)


def _tree_seconds(num_bytes: float, group: Group, cluster: Cluster, protocol: Protocol) -> float:
    bus = bus_bandwidth(group, cluster)
    rate = min(0.92 * bus, _channel_most(cluster))
    if protocol == "ll":
        rate = min(rate, bus / 3.8, _ll_most(group, cluster))
    elif protocol == "ll128":
        rate *= 7 / 9 if group.nodes == 1 else 120 / 128
    intra = _INTRA_US[_link_kind(cluster), "tree"][protocol]
    hops = (group.node_ranks - 1) * intra + math.log2(group.nodes) * _NETWORK_US["tree"][protocol]
    return (_BASE_US["tree"][protocol] + 2 * hops) * 1e-6 + 2 * num_bytes / rate


def _nvls_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    link = cluster.node.inside
    bus = link.nvls_bandwidth(group.ranks)
    if not link.nvls_ring:
        channels = 16
        share = _NVLS_EFFICIENCY.get(cluster.device.generation, 0.85) * (channels - 1) / channels
        bus = link.ring_bandwidth(group.ranks) * share * 2 * (group.ranks - 1) / group.ranks
    return _NVLS_US * 1e-6 + num_bytes * 2 * (group.ranks - 1) / (group.ranks * bus)


def _send_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Returns the time of one message between two ranks, while the others of their nodes send theirs."""
    if group.nodes == 1 or cluster.between is None:
        return _BASE_US["ring"]["simple"] * 1e-6 + num_bytes / cluster.node.inside.reached
    rate = cluster.between.reached / cluster.node.devices
    return (_BASE_US["ring"]["simple"] + _NETWORK_US["ring"]["simple"]) * 1e-6 + num_bytes / rate


def _all_to_all_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Returns the time where each rank sends an equal part of its buffer, ``num_bytes``, to each other rank."""
    within = num_bytes * (group.node_ranks - 1) / group.ranks / cluster.node.inside.reached
    if group.nodes == 1 or cluster.between is None:
        return (_BASE_US["ring"]["simple"] + 3.4) * 1e-6 + within
    rate = cluster.between.reached / cluster.node.devices
    across = num_bytes * (1 - group.node_ranks / group.ranks) / rate
    return (_BASE_US["ring"]["simple"] + 14.0) * 1e-6 + max(within, across)
