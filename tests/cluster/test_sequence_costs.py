"""What ranks that share sequences wait for one another, by method, and which is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.devices import load_cluster
from paceline.cluster.sequence_costs import (
    AttentionWork,
    choose_split,
    sequence_seconds,
    share_of_pairs,
    typical_documents,
)
from paceline.cluster.wires import wire_cost
from paceline.schedule.ring import SequenceSplit, split_sequence

WORK = AttentionWork(batch=2, tokens=1024, heads=8, kv_heads=2, width=64, itemsize=2, compute_s=0.0)
PAIR = 2 * 2 * 256 * 2 * 64 * 2  # bytes of K and V on one of four ranks


def per_byte(kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    del kind, ranks
    return float(num_bytes)


def test_a_ring_waits_for_what_computing_does_not_hide() -> None:
    ring = split_sequence("ring", 4, 8)
    # K and V three times; and again in backward, with gradients in float32.
    assert sequence_seconds(WORK, ring, range(4), per_byte) == 3 * PAIR + 3 * 3 * PAIR
    # A turn of backward takes 2.5: the third K and V come behind the first gradients, 0.5 too late; the last gradients
    # have nothing to hide behind.
    hidden = replace(WORK, compute_s=4.0 * PAIR)
    assert sequence_seconds(hidden, ring, range(4), per_byte) == (0.5 + 2) * PAIR


def test_of_packed_documents_those_that_are_cut_travel() -> None:
    ring = split_sequence("ring", 4, 8)
    whole = replace(WORK, compute_s=1e6, documents=tuple(range(0, 1024, 128)))
    assert sequence_seconds(whole, ring, range(4), per_byte) == 0
    waits = [
        sequence_seconds(replace(WORK, documents=documents), ring, range(4), per_byte)
        for documents in ((0, 1023), (0, 512, 1023), tuple(range(0, 1000, 100)))
    ]
    assert sequence_seconds(WORK, ring, range(4), per_byte) >= waits[0] > waits[1] > waits[2] > 0
    hidden = replace(WORK, compute_s=1e9, documents=(0, 512, 768))
    assert 0 < sequence_seconds(hidden, ring, range(4), per_byte) < 0.5 * 3.5e9  # the rank with the most work


def test_messages_for_several_ranks_wait_for_their_beginnings_together() -> None:
    def slow(kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
        return 1e6 + per_byte(kind, num_bytes, ranks)

    packed, ring = replace(WORK, documents=(0, 1023)), split_sequence("ring", 4, 8)
    more = [
        sequence_seconds(each, ring, range(4), slow) - sequence_seconds(each, ring, range(4), per_byte)
        for each in (WORK, packed)
    ]
    assert more[0] == pytest.approx(3e6 + 6e6)
    assert more[1] < 0.7 * more[0]


def test_typical_documents_fill_a_row() -> None:
    starts = typical_documents(2**19, 2048)
    assert starts[0] == 0
    assert len(starts) == pytest.approx(2**19 / 2048, rel=0.1)
    assert share_of_pairs(2**19, starts) == pytest.approx(2.7 * 2048 / 2**19, rel=0.5)  # of lognormal lengths, e^1
    assert share_of_pairs(8, (0, 4)) == 0.5


def test_ulysses_makes_as_many_heads_of_keys_as_ranks() -> None:
    query, key = (2 * 256 * heads * 64 * 2 for heads in (8, 4))
    assert sequence_seconds(WORK, split_sequence("ulysses", 4, 8), range(4), per_byte) == 2 * (2 * query + 2 * key)


def test_both_are_a_ring_of_groups() -> None:
    split = SequenceSplit(method="both", ring=2, ulysses=2)
    query, key = (2 * 256 * heads * 64 * 2 for heads in (8, 2))
    pair = 2 * 2 * 512 * 1 * 64 * 2
    exchanged = 2 * (2 * query + 2 * key)
    assert sequence_seconds(WORK, split, range(4), per_byte) == exchanged + pair + 3 * pair


def test_gather_computes_what_is_masked() -> None:
    split, work = split_sequence("gather", 4, 8), replace(WORK, compute_s=7.0)
    assert sequence_seconds(work, split, range(4), per_byte) == 3.5 * 7.0 + 2 * 4 * PAIR


@pytest.mark.parametrize(
    ("cluster", "ranks", "tokens", "expected"),
    [("8xh100", 8, 65536, (8, 1)), ("64xh100", 64, 8192, (4, 16)), ("64xh100", 64, 524288, (64, 1))],
)
def test_what_is_taken(cluster: str, ranks: int, tokens: int, expected: tuple[int, int]) -> None:
    """Computing on long rows hides a ring; where it does not, groups exchange heads, inside a node if it can be."""
    compute_s = 2 * tokens * tokens * 16 * 128 / ranks / 400e12
    work = AttentionWork(batch=1, tokens=tokens, heads=16, kv_heads=4, width=128, itemsize=2, compute_s=compute_s)
    split = choose_split(work, range(ranks), wire_cost(load_cluster(cluster), ranks))
    assert (split.ring, split.ulysses) == expected
    assert split.method == {1: "ring", ranks: "ulysses"}.get(split.ulysses, "both")
