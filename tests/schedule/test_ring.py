"""How ranks share each sequence: every place has one rank, the ring meets every pair once, and the work is even."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.schedule.ring import (
    ORDERS,
    Order,
    Share,
    chunks_of,
    cut_parts,
    deal,
    deal_documents,
    meets_of,
    render_ring,
    ring_schedule,
    sent_ahead,
    split_sequence,
    ulysses_sizes,
)

RINGS = [(ranks, order) for ranks in (1, 2, 3, 4, 8) for order in ORDERS]


def places(share: Share) -> list[int]:
    return [place for part in share for piece in part.pieces for place in piece]


def work(share: Share, documents: list[int]) -> int:
    """How many keys the queries of a share meet."""
    return sum(place - max(start for start in documents if start <= place) + 1 for place in places(share))


@given(st.integers(1, 70), st.sampled_from(RINGS))
def test_every_place_of_a_row_has_one_rank(length: int, ring: tuple[int, Order]) -> None:
    dealt = deal(length, *ring)
    assert sorted(place for share in dealt for place in places(share)) == list(range(length))
    for rank, share in enumerate(dealt):
        assert places(share) == sorted(places(share))
        assert len(places(share)) == length // ring[0] + (rank < length % ring[0])


ROWS = st.lists(st.sets(st.integers(1, 69), max_size=12), min_size=1, max_size=3)


def cut(length: int, rows: list[set[int]]) -> list[list[int]]:
    return [[0, *sorted(each for each in row if each < length)] for row in rows]


@given(st.integers(1, 70), st.sampled_from([1, 2, 3, 4, 8]), ROWS)
def test_every_place_of_packed_rows_has_one_rank(length: int, ranks: int, rows: list[set[int]]) -> None:
    starts = cut(length, rows)
    for documents, dealt in zip(starts, deal_documents(length, ranks, starts), strict=True):
        assert sorted(place for share in dealt for place in places(share)) == list(range(length))
        for rank, share in enumerate(dealt):
            assert len(places(share)) == length // ranks + (rank < length % ranks)  # whatever the documents
            assert [part.is_whole for part in share] == sorted(part.is_whole for part in share)
            for part in share:
                found = [place for piece in part.pieces for place in piece]
                assert found == sorted(found) == places(share)[part.places]
                assert all(max(each for each in documents if each <= place) == part.document for place in found)
                others = [other for each in dealt for other in each if other.document == part.document]
                assert part.is_whole == (len(others) == 1)


@given(st.integers(1, 70), st.sampled_from([2, 3, 4, 8]), ROWS, st.booleans())
def test_queries_meet_the_keys_of_others_that_they_should(
    length: int, ranks: int, rows: list[set[int]], is_causal: bool
) -> None:
    (documents,) = starts = cut(length, rows[:1])
    (dealt,) = deal_documents(length, ranks, starts)
    document = [max(each for each in documents if each <= place) for place in range(length)]
    expected = {
        (query, key)
        for query in range(length)
        for key in range(length)
        if document[query] == document[key] and (key <= query or not is_causal)
    }
    cuts = [cut_parts(share) for share in dealt]
    found = [
        (query, key)
        for share in dealt
        for part in share
        for query in places([part])
        for key in places([part])
        if key <= query or not is_causal
    ]
    for own in cuts:
        for other in cuts:
            for meet in meets_of(own, other, is_causal) if own is not other else ():
                keys = places([meet.other])
                assert meet.keys == max(count for _, count in meet.pairs) <= len(keys)
                found += [
                    (places(own)[query], key)
                    for queries, count in meet.pairs
                    for query in queries
                    for key in keys[:count]
                ]
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_even_in_zigzag_order(ranks: int) -> None:
    length = 2 * ranks * 16
    works = [work(share, [0]) for share in deal(length, ranks)]
    assert len(set(works)) == 1
    assert max(works := [work(share, [0]) for share in deal(length + 1, ranks)]) - min(works) <= length + 1
    assert max(work(share, [0]) for share in deal(length, ranks, "contiguous")) > 1.4 * works[0]


def drawn(length: int, mean: int, seed: int) -> list[int]:
    generator, starts = random.Random(seed), [0]
    while (end := starts[-1] + 1 + int(generator.expovariate(1 / mean))) < length:
        starts.append(end)
    return starts


@pytest.mark.some(6)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mean", [100, 1000, 4000])
def test_work_is_even_where_documents_are_packed(mean: int, seed: int) -> None:
    documents = drawn(65536, mean, seed)
    (dealt,) = deal_documents(65536, 4, [documents])
    works = [work(share, documents) for share in dealt]
    assert max(works) * 4 <= 1.2 * sum(works)
    travelling = sum(part.tokens for share in dealt for part in share if not part.is_whole)
    assert travelling <= {100: 0.01, 1000: 0.12, 4000: 0.7}[mean] * 65536


def test_rows_of_a_batch_are_even_together() -> None:
    """Each row has one long document: no rank has the work of two."""
    starts = [[0, *range(16, 32)], [0, *range(16, 32)]]
    rows = deal_documents(32, 2, starts)
    works = [sum(work(row[rank], documents) for row, documents in zip(rows, starts, strict=True)) for rank in (0, 1)]
    assert max(works) <= 1.1 * min(works)
    assert all(part.is_whole for row in rows for share in row for part in share)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_messages_are_sent_ahead_while_they_are_small(sizes: list[int], most: int) -> None:
    ahead = sent_ahead(sizes, most)
    assert len(ahead) == len(sizes) + 1
    assert ahead == sorted(ahead)
    for number, sent in enumerate(ahead):
        assert min(number + 1, len(sizes)) <= sent <= len(sizes)
        assert sent == min(number + 1, len(sizes)) or sum(sizes[number:sent]) <= most


@pytest.mark.parametrize(("ranks", "order"), RINGS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_every_pair_of_chunks_that_can_meet_does_once(ranks: int, order: Order, is_causal: bool) -> None:
    rows = ring_schedule(ranks, order, is_causal=is_causal)
    chunks = [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks, order)]
    pairs = [pair for row in rows for step in row for pair in step.chunk_pairs]
    assert sorted(pairs) == sorted((q, k) for q in chunks for k in chunks if k <= q or not is_causal)
    for row in rows:
        for step, after in pairwise(row):  # what a rank has next is what the rank before it has now
            assert rows[(step.rank - 1) % ranks][step.number].source == after.source
            assert (step.meets == "nothing") == (not step.chunk_pairs)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_in_zigzag_order_each_step_is_as_much_work_for_all(ranks: int) -> None:
    assert {step.work for row in ring_schedule(ranks) for step in row} == {2.0}


@pytest.mark.parametrize(("ranks", "order"), RINGS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_ranks_compute_what_the_schedule_says(ranks: int, order: Order, is_causal: bool) -> None:
    shares = deal(2 * ranks * 6, ranks, order)
    size = 6 if order == "zigzag" else 12  # tokens of a chunk
    for row in ring_schedule(ranks, order, is_causal=is_causal):
        for step in row[1:]:
            found = [
                pair for meet in meets_of(shares[step.rank], shares[step.source], is_causal) for pair in meet.pairs
            ]
            assert sum(len(queries) * keys for queries, keys in found) == step.work * size**2


def test_a_ring_as_text() -> None:
    assert render_ring(2).splitlines() == [
        "zigzag, causal: each rank computes 100% of the time",
        "kv 3: 7-4 7/7 is: with keys and values of rank 3, queries of chunk 7 meet keys of chunk 4, and half of 7",
        "",
        "chunks       step 0             step 1",
        "rank 0: 0 3  kv 0: 0/0 3-0 3/3  kv 1: 3-1 3-2",
        "rank 1: 1 2  kv 1: 1/1 2-1 2/2  kv 0: 1-0 2-0",
    ]
    assert "computes 57% of the time" in render_ring(4, "contiguous")
    assert "rank 0: 0  kv 0: 0/0  kv 2: -" in render_ring(3, "contiguous")


def test_methods_spread_ranks() -> None:
    def shape(*given: object, **options: int) -> tuple[int, int]:
        split = split_sequence(*given, **options)  # type: ignore[arg-type]
        assert split.ranks == given[1]
        return split.ring, split.ulysses

    assert shape("ring", 6, 5) == shape("gather", 6, 5) == (6, 1)
    assert shape("ulysses", 4, 8) == (1, 4)
    assert shape("both", 8, 8) == (2, 4)
    assert shape("both", 8, 8, node_ranks=2) == (4, 2)
    assert shape("both", 3, 8) == (3, 1)  # no group of heads divides three ranks
    assert ulysses_sizes(12, 8) == [1, 2, 4]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ulysses with 6 heads on 4 ranks(.|\n)*take 2 ranks, or method ring"):
        split_sequence("ulysses", 4, 6)
