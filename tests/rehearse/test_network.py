"""Costs of operations on a cluster: NCCL's on GPUs, messages on hosts, and who is on which node."""

from __future__ import annotations

import pytest

from paceline.cluster.costs import Placement, Wires, all_reduce_seconds, scatter_seconds
from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import Group, collective_seconds, over_backend, wire_cost
from paceline.errors import UsageError

MIB = 2**20


@pytest.mark.parametrize(
    ("kind", "ranks", "group"),
    [
        ("all_reduce", tuple(range(8)), Group(8, 1)),
        ("all_reduce", tuple(range(16)), Group(16, 2)),
        ("all_gather", (0, 8), Group(2, 2)),
        ("reduce_scatter", (0, 1, 2, 3), Group(4, 1)),
        ("send", (7, 8), Group(2, 2)),
        ("all_to_all", (0, 1), Group(2, 1)),
    ],
)
def test_gpus_cost_what_nccl_does(kind: str, ranks: tuple[int, ...], group: Group) -> None:
    cluster = load_cluster("2x dgx-a100")
    cost = wire_cost(cluster, 16)
    assert cost(kind, MIB, ranks) == collective_seconds(kind, MIB, group, cluster) > 0  # type: ignore[arg-type]


def test_a_broadcast_moves_the_bytes_once_and_a_barrier_a_number() -> None:
    cluster = load_cluster("1x dgx-a100")
    cost, all_ranks = wire_cost(cluster, 8), tuple(range(8))
    assert cost("broadcast", MIB, all_ranks) == cost("all_gather", MIB, all_ranks)
    assert cost("barrier", 0, all_ranks) == cost("all_reduce", 4, all_ranks) > 0


def test_hosts_cost_the_least_of_the_algorithms() -> None:
    one, links = wire_cost(None, 4), Wires()
    ranks = (0, 1, 2, 3)
    where = Placement(ranks=4)
    known = ("ring", "tree", "halving_doubling")
    assert one("all_reduce", MIB, ranks) == min(all_reduce_seconds(name, MIB, where, links) for name in known)
    assert one("all_gather", MIB, ranks) == scatter_seconds("halving_doubling", MIB, where, links)
    assert one("send", MIB, (0, 1)) == links.inside.seconds(MIB)
    two = wire_cost(None, 4, node_ranks=2)
    assert two("send", MIB, (1, 2)) == links.across.seconds(MIB)
    assert two("all_reduce", MIB, ranks) > one("all_reduce", MIB, ranks)
    assert two("all_reduce", MIB, (0, 1, 2)) > 0  # a group of one rank here and two there
    assert one("broadcast", MIB, ranks) > one("barrier", 0, ranks) > 0


def test_every_rank_needs_a_device() -> None:
    with pytest.raises(UsageError, match=r"9 ranks on 1x dgx-a100, which has 8 devices(.|\n)*2x dgx-a100"):
        wire_cost(load_cluster("1x dgx-a100"), 9)


def test_the_backend_that_a_config_asks_for_counts() -> None:
    host, gpus = load_cluster("2x cpu-host"), load_cluster("1x dgx-a100")
    costs = [wire_cost(over_backend(host, name), 2)("all_reduce", MIB, (0, 1)) for name in ("shared_memory", "gloo")]
    assert costs[0] < costs[1]
    assert over_backend(host, "auto") is over_backend(host, "virtual") is over_backend(host, "shared_memory") is host
    assert over_backend(gpus, "nccl") is over_backend(gpus, "auto") is gpus
    loopback = load_cluster("cpu-host-gloo")
    assert over_backend(loopback, "gloo") == loopback


@pytest.mark.parametrize(
    ("name", "backend", "rule"),
    [
        ("2x cpu-host", "nccl", "nccl moves bytes between GPUs only"),
        ("1x dgx-a100", "gloo", "through their hosts, which was not measured"),
        ("1x dgx-a100", "shared_memory", "shared memory joins CPU ranks of one host"),
        ("2x cpu-host over ethernet-10g", "shared_memory", "shared memory joins CPU ranks of one host"),
        ("cpu-host-gloo", "shared_memory", "the ranks of cpu-host-gloo talk over cpu-host-gloo"),
        ("cpu-host-alone", "gloo", "cpu-host-alone was not measured over Gloo"),
    ],
)
def test_a_backend_that_cannot_be_priced_is_refused(name: str, backend: str, rule: str) -> None:
    with pytest.raises(UsageError, match=f"comm.backend = {backend} on (.|\n)*{rule}(.|\n)*set comm.backend = auto"):
        over_backend(load_cluster(name), backend)
