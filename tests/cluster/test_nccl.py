"""NCCL's cost model, beside figures that were measured and published."""

from __future__ import annotations

import pytest

from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import Collective, Group, bus_bandwidth, collective_seconds, group_of

NODE = load_cluster("1x dgx-a100")
FOUR = load_cluster("4x dgx-a100")


@pytest.mark.parametrize(
    ("name", "ranks", "num_bytes", "bus"),
    # Bus bandwidth of large all-reduces as published: vTrain's traces (A100), ml-engineering (H200, B200).
    [
        ("dgx-a100", 8, 2**30, 230e9),
        ("dgx-a100", 2, 2**30, 194e9),
        ("dgx-h200", 8, 2**33, 473e9),
        ("dgx-b200", 8, 2**33, 838e9),
    ],
)
def test_large_all_reduces_reach_what_was_measured(name: str, ranks: int, num_bytes: int, bus: float) -> None:
    found = collective_seconds("all_reduce", num_bytes, Group(ranks), load_cluster(f"1x {name}"))
    assert 2 * (ranks - 1) / ranks * num_bytes / found == pytest.approx(bus, rel=0.03)


def test_small_ones_cost_latency_and_the_cheapest_protocol_wins() -> None:
    # LL ring: 6.6 + 14 x 0.6 us; LL tree: 6.8 + 2 x 7 x 0.6 us.
    assert collective_seconds("all_reduce", 8, Group(8), NODE) == pytest.approx(15.0e-6, rel=0.01)


def test_an_all_gather_takes_half_an_all_reduce() -> None:
    whole = collective_seconds("all_reduce", 2**30, Group(8), NODE)
    kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
    assert all(collective_seconds(kind, 2**30, Group(8), NODE) == pytest.approx(whole / 2, rel=0.02) for kind in kinds)


def test_groups_know_their_nodes() -> None:
    assert group_of(FOUR, 8) == Group(8, 1)
    assert group_of(FOUR, 32) == Group(32, 4)
    assert group_of(FOUR, 4, stride=8) == Group(4, 4)
    assert group_of(FOUR, 8, stride=4) == Group(8, 4)


def test_a_group_has_its_share_of_the_network() -> None:
    assert FOUR.between is not None
    rate = FOUR.between.bandwidth * FOUR.between.efficiency
    assert bus_bandwidth(Group(32, 4), FOUR) == pytest.approx(min(rate, 230e9))
    assert bus_bandwidth(Group(4, 4), FOUR) == pytest.approx(rate / 8)


def test_ethernet_is_crowded_above_its_leaves_and_infiniband_is_not() -> None:
    rates = {
        network: [
            bus_bandwidth(Group(8 * nodes, nodes), load_cluster(f"{nodes}x dgx-a100 over {network}"))
            for nodes in (4, 16, 64, 128)
        ]
        for network in ("roce-4x100", "infiniband-hdr-4x")
    }
    assert len(set(rates["infiniband-hdr-4x"])) == 1
    assert rates["roce-4x100"][0] == rates["roce-4x100"][1]
    assert rates["roce-4x100"][0] / rates["roce-4x100"][3] == pytest.approx(1 + 3 * 0.05)
    assert rates["roce-4x100"][2] > rates["roce-4x100"][3]


def test_one_rank_or_nothing_costs_nothing() -> None:
    assert collective_seconds("all_reduce", 2**20, Group(1), NODE) == 0.0
    assert collective_seconds("all_gather", 0, Group(8), NODE) == 0.0


def test_more_bytes_never_take_less() -> None:
    sizes = [2**power for power in range(3, 34)]
    times = [collective_seconds("all_reduce", size, Group(32, 4), FOUR) for size in sizes]
    assert times == sorted(times)
