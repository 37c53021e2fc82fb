"""Groups: each question about ranks has one answer, and the answers fit together on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.layout import GROUP_NAMES, STRATEGIES, Layout, groups_of, names_of

LAYOUTS = st.builds(
    lambda strategy, sizes, shards: Layout(
        strategy=strategy,
        pipeline=sizes[0],
        context_ranks=sizes[2],
        tensor=sizes[3],
        shard_ranks=min(shards, sizes[1]) if strategy == "hybrid" else 0,
    ).for_ranks(sizes[0] * sizes[1] * sizes[2] * sizes[3]),
    st.sampled_from(STRATEGIES),
    st.tuples(*[st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2])]),
    st.sampled_from([1, 2]),
)


@given(layout=LAYOUTS)
def test_every_group_is_that_of_all_its_ranks(layout: Layout) -> None:
    everyone = [groups_of(layout, rank) for rank in range(layout.ranks)]
    for name in GROUP_NAMES:
        for rank, groups in enumerate(everyone):
            ranks = getattr(groups, name)
            assert rank in ranks
            assert list(ranks) == sorted(set(ranks))
            assert all(getattr(everyone[other], name) == ranks for other in ranks)


@given(layout=LAYOUTS)
def test_slices_times_copies_are_the_ranks_that_average(layout: Layout) -> None:
    for rank in range(layout.ranks):
        groups = groups_of(layout, rank)
        assert len(groups.batch) == layout.data
        assert len(groups.gradients) == layout.data * layout.context_ranks
        assert (len(groups.shard), len(groups.replicate)) == (layout.shards, layout.replicas)
        assert set(groups.shard) & set(groups.replicate) == {rank}
        assert set(groups.shard) | set(groups.replicate) <= set(groups.gradients)
        assert set(groups.batch) & set(groups.context) == {rank}


@pytest.mark.parametrize(
    ("fields", "rank", "expected"),
    [
        ({"pipeline": 2}, 1, {"pipeline": (1, 3), "gradients": (0, 1), "tensor": (1,)}),
        ({"tensor": 2}, 2, {"tensor": (2, 3), "gradients": (0, 2), "pipeline": (2,)}),
        ({"strategy": "hybrid", "shard_ranks": 2}, 2, {"shard": (2, 3), "replicate": (0, 2), "batch": (0, 1, 2, 3)}),
        ({"strategy": "fsdp", "context_ranks": 2}, 1, {"shard": (0, 1, 2, 3), "batch": (1, 3), "context": (0, 1)}),
        ({"strategy": "ddp", "context_ranks": 2}, 1, {"shard": (1,), "replicate": (0, 1, 2, 3), "batch": (1, 3)}),
    ],
)
def test_who_talks_to_whom_on_four_ranks(fields: dict[str, Any], rank: int, expected: dict[str, Any]) -> None:
    groups = groups_of(Layout(**fields).for_ranks(4), rank)
    assert {name: getattr(groups, name) for name in expected} == expected


def test_experts_are_laid_over_the_ranks_that_average_gradients() -> None:
    layout = Layout(expert=2, pipeline=2).for_ranks(8)
    assert [groups_of(layout, rank).expert for rank in (0, 3, 6)] == [(0, 1), (2, 3), (6, 7)]
    assert [groups_of(layout, rank).expert_gradients for rank in (0, 3, 6)] == [(0, 2), (1, 3), (4, 6)]
    assert groups_of(layout, 5).gradients == (4, 5, 6, 7)


def test_records_name_a_group_by_its_axis() -> None:
    layout = Layout(strategy="hybrid", pipeline=2, shard_ranks=2).for_ranks(8)
    assert names_of(groups_of(layout, 5)) == {
        tuple(range(8)): "world",
        (1, 5): "pipeline",
        (5, 7): "replicate",
        (4, 5): "shard",
        (4, 5, 6, 7): "data",
    }
