"""The formulas: what theory says of each algorithm, shapes that are what they should be, and choices that follow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.costs import (
    ALGORITHMS,
    Algorithm,
    Placement,
    Wire,
    Wires,
    all_reduce_messages,
    all_reduce_seconds,
    broadcast_seconds,
    chain,
    double_tree,
    fastest_all_reduce,
    fastest_broadcast,
    fastest_scatter,
    halving,
    host_link_bytes,
    rooted_tree,
    scatter_seconds,
    sent_bytes,
)
from paceline.errors import UsageError

ALPHA, BETA = 1e-3, 1e-6
LINKS = Wires(inside=Wire(alpha_s=ALPHA, bandwidth=1 / BETA), across=Wire(alpha_s=2 * ALPHA, bandwidth=0.1 / BETA))
MB = 2**20


# Shapes


@pytest.mark.parametrize("size", range(1, 65))
def test_whoever_has_children_in_one_tree_is_a_leaf_of_the_other(size: int) -> None:
    trees = double_tree(size)
    for tree in trees:
        assert sorted(child for rank in range(size) for child in tree.children(rank)) == sorted(
            set(range(size)) - {tree.root}
        )
        assert all(len(tree.children(rank)) <= 2 for rank in range(size))
        assert tree.height <= math.ceil(math.log2(size + 1))
    inner = [{rank for rank in range(size) if tree.children(rank)} for tree in trees]
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("size", range(1, 12))
def test_trees_and_chains_start_where_they_are_told(size: int) -> None:
    for source in range(size):
        for tree in (rooted_tree(size, source), chain(size, source)):
            assert tree.root == source
            assert tree.depths[source] == 0
            assert all(tree.depths[r] == tree.depths[tree.parents[r]] + 1 for r in range(size) if r != source)
        assert chain(size, source).height == size - 1


@pytest.mark.parametrize("size", range(1, 40))
def test_halving_sums_every_slice_once_in_few_rounds_with_the_fewest_bytes(size: int) -> None:
    rounds = halving(size)
    assert len(rounds) == math.ceil(math.log2(size))
    holds = [[{rank} for _ in range(size)] for rank in range(size)]  # whose values are in a rank's slice
    for exchanges in rounds:
        before = [[set(part) for part in rank] for rank in holds]
        for exchange in exchanges:
            for part in range(exchange.first, exchange.last):
                assert not holds[exchange.receiver][part] & before[exchange.sender][part]
                holds[exchange.receiver][part] |= before[exchange.sender][part]
    assert all(holds[rank][rank] == set(range(size)) for rank in range(size))
    assert sum(e.last - e.first for each in rounds for e in each) == size * (size - 1)


# Bytes


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9, 16])
def test_bytes_of_a_rank_are_those_of_the_textbook(size: int) -> None:
    where, most = Placement(ranks=size), 2 * 720 * (size - 1) / size
    assert sent_bytes("ring", 720, where, 0) == pytest.approx(most)
    halved = [sent_bytes("halving_doubling", 720, where, rank) for rank in range(size)]
    assert sum(halved) == pytest.approx(most * size)
    if size & (size - 1) == 0:
        assert halved == pytest.approx([most] * size)
    assert all(0 < sent_bytes("tree", 720, where, rank) <= 2 * 720 for rank in range(size))


@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (8, 2), (12, 3), (16, 4), (64, 8)])
def test_hierarchical_puts_the_least_on_the_link_of_a_host(ranks: int, hosts: int) -> None:
    where = Placement(ranks=ranks, hosts=hosts)
    assert host_link_bytes("hierarchical", 960, where) == pytest.approx(2 * 960 * (hosts - 1) / hosts)
    assert host_link_bytes("ring", 960, where) == pytest.approx(2 * 960 * (ranks - 1) / ranks)
    for name in ALGORITHMS:
        assert host_link_bytes(name, 960, where) >= host_link_bytes("hierarchical", 960, where) * (1 - 1e-9)
    assert host_link_bytes("ring", 960, Placement(ranks=4)) == 0


@given(
    name=st.sampled_from(ALGORITHMS), hosts=st.integers(1, 6), local=st.integers(1, 5), num_bytes=st.integers(0, 10**9)
)
def test_a_cost_is_never_negative_and_grows_with_the_size(
    name: Algorithm, hosts: int, local: int, num_bytes: int
) -> None:
    where = Placement(ranks=hosts * local, hosts=hosts)
    seconds = all_reduce_seconds(name, num_bytes, where, LINKS)
    assert 0 <= seconds <= all_reduce_seconds(name, 2 * num_bytes, where, LINKS)
    assert (seconds == 0) == (where.ranks == 1)
    messages = all_reduce_messages(name, num_bytes, where)
    assert all(sender != receiver and size >= 0 for sender, receiver, size in messages)


# Seconds


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_seconds_on_one_host_are_those_of_the_textbook(size: int) -> None:
    where = Placement(ranks=size)
    share = MB * (size - 1) / size * BETA
    assert all_reduce_seconds("ring", MB, where, LINKS) == pytest.approx(2 * (size - 1) * ALPHA + 2 * share)
    assert all_reduce_seconds("halving_doubling", MB, where, LINKS) == pytest.approx(
        2 * math.log2(size) * ALPHA + 2 * share
    )
    assert scatter_seconds("ring", MB, where, LINKS) == pytest.approx((size - 1) * ALPHA + share)
    assert scatter_seconds("halving_doubling", MB, where, LINKS) == pytest.approx(math.log2(size) * ALPHA + share)


def test_the_link_between_hosts_is_shared_by_their_ranks() -> None:
    where = Placement(ranks=8, hosts=2)
    ring = 2 * 7 * (2 * ALPHA + MB / 8 * 10 * BETA)
    assert all_reduce_seconds("ring", MB, where, LINKS) == pytest.approx(ring)
    inside, across = 2 * (ALPHA + MB * 3 / 4 * BETA), 2 * (2 * ALPHA + MB / 2 * 10 * BETA)
    assert all_reduce_seconds("hierarchical", MB, where, LINKS) == pytest.approx(inside + across)
    # The first round of halving pairs the hosts: four ranks send half of it each over one link.
    halving_doubling = 2 * ((2 * ALPHA + 4 * MB / 2 * 10 * BETA) + 2 * ALPHA + (MB / 4 + MB / 8) * BETA)
    assert all_reduce_seconds("halving_doubling", MB, where, LINKS) == pytest.approx(halving_doubling)


def test_one_rank_uses_one_of_the_cards_of_a_host() -> None:
    where, two_cards, four_cards = Placement(ranks=8, hosts=2), replace(LINKS, cards=2), replace(LINKS, cards=4)
    ring = 2 * 7 * (2 * ALPHA + 4 * MB / 8 * 10 * BETA)
    assert all_reduce_seconds("ring", MB, where, four_cards) == pytest.approx(ring)
    assert scatter_seconds("ring", MB, where, four_cards) == pytest.approx(ring / 2)
    for algorithm in ("hierarchical", "halving_doubling"):  # all four ranks of a host send, each through its card
        alone = all_reduce_seconds(algorithm, MB, where, LINKS)
        assert all_reduce_seconds(algorithm, MB, where, four_cards) == alone
        assert all_reduce_seconds(algorithm, MB, where, two_cards) == alone
    eight = replace(LINKS, cards=8)  # of which four are idle
    inside, across = 2 * (ALPHA + MB * 3 / 4 * BETA), 2 * (2 * ALPHA + 2 * MB / 2 * 10 * BETA)
    assert all_reduce_seconds("hierarchical", MB, where, eight) == pytest.approx(inside + across)
    chain_s = broadcast_seconds("ring", MB, where, LINKS)
    assert broadcast_seconds("ring", MB, where, four_cards) > 3 * chain_s


def test_a_broadcast_goes_down_a_tree_or_along_a_chain() -> None:
    where = Placement(ranks=9)
    assert broadcast_seconds("ring", 8, where, LINKS) == pytest.approx(8 * (ALPHA + 8 * BETA), rel=1e-6)
    assert broadcast_seconds("tree", 8, where, LINKS) < 5 * (ALPHA + 16 * BETA)
    assert broadcast_seconds("ring", 8, Placement(ranks=1), LINKS) == 0


# Choices


def test_choices_follow_size_and_hosts() -> None:
    flat, hosts = Placement(ranks=16), Placement(ranks=16, hosts=4)
    assert fastest_all_reduce(64, flat, LINKS) in ("tree", "halving_doubling")
    assert fastest_all_reduce(64 * MB, hosts, LINKS) == "hierarchical"
    assert fastest_all_reduce(64 * MB, Placement(ranks=15), LINKS) == "ring"
    assert fastest_scatter(64, flat, LINKS) == "halving_doubling"
    assert fastest_scatter(64 * MB, Placement(ranks=15), LINKS) == "ring"
    assert fastest_broadcast(64, flat, LINKS) == "tree"
    assert fastest_broadcast(256 * MB, Placement(ranks=4), LINKS) == "ring"


@pytest.mark.parametrize(("ranks", "hosts"), [(0, 1), (4, 0), (4, 3)])
def test_hosts_hold_the_same_number_of_ranks(ranks: int, hosts: int) -> None:
    with pytest.raises(UsageError, match=f"{ranks} ranks on {hosts} hosts"):
        Placement(ranks=ranks, hosts=hosts)
