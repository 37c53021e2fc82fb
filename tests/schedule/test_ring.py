"""How ranks share each sequence: every place has one rank, the ring meets every pair once, and the work is even."""

from __future__ import annotations

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
    deal,
    documents_of,
    render_ring,
    ring_schedule,
    split_sequence,
    ulysses_sizes,
)

RINGS = [(ranks, order) for ranks in (1, 2, 3, 4, 8) for order in ORDERS]


def places(share: Share) -> list[int]:
    return [place for chunk, _ in share for place in chunk]


def work(share: Share, documents: list[int]) -> int:
    """How many keys the queries of a share meet."""
    return sum(place - max(start for start in documents if start <= place) + 1 for place in places(share))


@given(st.integers(1, 70), st.sampled_from(RINGS), st.sets(st.integers(1, 69), max_size=8))
def test_every_place_has_one_rank_and_ranks_have_as_many(length: int, ring: tuple[int, Order], cuts: set[int]) -> None:
    documents = [0, *sorted(cut for cut in cuts if cut < length)]
    dealt = deal(length, *ring, documents)
    assert sorted(place for share in dealt for place in places(share)) == list(range(length))
    for rank, share in enumerate(dealt):
        assert places(share) == sorted(places(share))
        assert len(places(share)) == length // ring[0] + (rank < length % ring[0])  # whatever the documents


@given(st.integers(1, 70), st.sampled_from(RINGS), st.sets(st.integers(1, 69), max_size=8))
def test_what_a_share_has_of_a_document_lies_together(length: int, ring: tuple[int, Order], cuts: set[int]) -> None:
    documents = [0, *sorted(cut for cut in cuts if cut < length)]
    for share in deal(length, *ring, documents):
        tokens = [(place, is_later) for chunk, is_later in share for place in chunk]
        found = documents_of(share, documents)
        assert sum(end - begin for begin, _, end in found.values()) == len(tokens)
        for start, (begin, middle, end) in found.items():
            assert all(max(each for each in documents if each <= place) == start for place, _ in tokens[begin:end])
            assert [is_later for _, is_later in tokens[begin:end]] == [False] * (middle - begin) + [True] * (
                end - middle
            )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_even_in_zigzag_order(ranks: int) -> None:
    length = 2 * ranks * 16
    works = [work(share, [0]) for share in deal(length, ranks)]
    assert len(set(works)) == 1
    assert max(works := [work(share, [0]) for share in deal(length + 1, ranks)]) - min(works) <= length + 1
    assert max(work(share, [0]) for share in deal(length, ranks, "contiguous")) > 1.4 * works[0]


@pytest.mark.parametrize("documents", [[0, 192], [0, 10, 200], [0, 64, 128, 192], list(range(0, 256, 5))])
def test_work_is_even_where_documents_are_packed(documents: list[int]) -> None:
    works = [work(share, documents) for share in deal(256, 4, "zigzag", documents)]
    assert max(works) * 4 <= 1.1 * sum(works)


def test_short_documents_stay_whole_where_the_work_is_even_anyway() -> None:
    assert deal(256, 4, "zigzag", list(range(0, 256, 8))) == deal(256, 4)


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
