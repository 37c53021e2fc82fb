"""The global order: laws that hold for every length, batch, number of ranks and place to resume from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order import DataOrder, Indices, mix_seed, share, shuffled_index
from paceline.errors import DataError, UsageError

# Written down once: a change here would change every run's data.
FIRST_ORDER = [7, 6, 1, 2, 5, 0, 8, 4, 3, 9]
SECOND_ORDER = [2, 5, 8, 9, 0, 6, 3, 7, 1, 4]
LAST_OF_A_TRILLION = 249_396_340_909

law = settings(deadline=None)  # a busy machine is no failure
seeds = st.integers(min_value=0, max_value=2**63 - 1)
orders = st.builds(
    lambda length, batch, seed, shuffle, drop: DataOrder(
        length=length, global_batch=batch, seed=seed, shuffle=shuffle, drop_last=drop and batch <= length
    ),
    st.integers(1, 200),
    st.integers(1, 70),
    seeds,
    st.booleans(),
    st.booleans(),
)


def epoch_order(length: int, seed: int = 0, epoch: int = 0) -> Indices:
    return shuffled_index(np.arange(length, dtype=np.int64), length, seed, epoch)


@pytest.mark.parametrize("lengths", [range(1, 130), [997, 1024, 1025, 4096, 65_537, 100_000]], ids=["small", "large"])
def test_is_a_permutation_for_every_length(lengths: Iterable[int]) -> None:
    for length in lengths:
        assert np.array_equal(np.sort(epoch_order(length)), np.arange(length)), length


@law
@given(length=st.integers(1, 5000), seed=seeds, epoch=st.integers(-1, 1000))
def test_is_a_permutation_for_every_key(length: int, seed: int, epoch: int) -> None:
    np.testing.assert_array_equal(np.sort(epoch_order(length, seed, epoch)), np.arange(length))


@law
@given(length=st.integers(1, 2**62), seed=seeds, start=st.integers(0, 2**62))
def test_stays_one_to_one_and_in_range_for_lengths_that_cannot_be_stored(length: int, seed: int, start: int) -> None:
    first = start % length
    positions = np.arange(first, min(first + 300, length), dtype=np.int64)
    index = shuffled_index(positions, length, seed, 3)
    assert len(np.unique(index)) == len(positions)
    assert index.min() >= 0
    assert index.max() < length


@law
@given(length=st.integers(1, 3000), seed=seeds, data=st.data())
def test_each_position_is_computed_on_its_own(length: int, seed: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    positions = np.array(wanted, dtype=np.int64)
    np.testing.assert_array_equal(shuffled_index(positions, length, seed, 5), epoch_order(length, seed, 5)[positions])


def test_the_order_is_the_same_on_every_platform_and_in_every_release() -> None:
    assert epoch_order(10, seed=1).tolist() == FIRST_ORDER
    assert epoch_order(10, seed=1, epoch=1).tolist() == SECOND_ORDER
    last = shuffled_index(np.array([10**12 - 1]), 10**12, 7, 2)
    assert last.tolist() == [LAST_OF_A_TRILLION]


def test_epochs_and_seeds_give_unrelated_orders() -> None:
    keys = [(seed, epoch) for seed in range(12) for epoch in range(12)]
    orders = np.stack([epoch_order(2000, seed, epoch) for seed, epoch in keys]).astype(np.float64)
    correlations = np.asarray(np.corrcoef(orders))[np.triu_indices(len(keys), k=1)]
    # Each is about normal with deviation 1/sqrt(2000) = 0.022; among 10,296 pairs none should be 6 deviations off.
    assert np.abs(correlations).max() < 6 / math.sqrt(2000)
    assert abs(correlations.std() * math.sqrt(2000) - 1) < 0.1


@pytest.mark.parametrize("length", [64, 1000, pytest.param(4099, marks=pytest.mark.exhaustive)])
def test_an_order_has_no_trace_of_the_original_one(length: int) -> None:
    orders = np.stack([epoch_order(length, seed) for seed in range(400)]).astype(np.float64)
    place = np.arange(length, dtype=np.float64)
    with_place = np.array([np.corrcoef(order, place)[0, 1] for order in orders])
    with_neighbour = np.array([np.corrcoef(order[1:], order[:-1])[0, 1] for order in orders])
    for correlation in (with_place, with_neighbour):
        assert abs(correlation.std() * math.sqrt(length) - 1) < 0.2
        assert abs(correlation.mean()) * math.sqrt(length * 400) < 5 + 400**0.5 / math.sqrt(length)
    fixed_points = (orders == place).sum(axis=1)
    assert abs(fixed_points.mean() - 1) < 5 / math.sqrt(400)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_every_order_of_a_few_samples_comes_equally_often(length: int) -> None:
    num_orders = math.factorial(length)
    counts = Counter(tuple(epoch_order(length, seed).tolist()) for seed in range(100 * num_orders))
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert len(counts) == num_orders
    assert chi_square < num_orders - 1 + 5 * math.sqrt(2 * num_orders)


def test_every_sample_comes_first_equally_often() -> None:
    length, draws = 19, 1900
    counts = np.bincount([int(shuffled_index(np.array([0]), length, 9, epoch)[0]) for epoch in range(draws)])
    chi_square = float(((counts - draws / length) ** 2 / (draws / length)).sum())
    assert chi_square < length - 1 + 5 * math.sqrt(2 * length)


@pytest.mark.parametrize("position", [-1, 10])
def test_refuses_a_position_outside_the_epoch(position: int) -> None:
    with pytest.raises(UsageError, match="from 0 to 9"):
        shuffled_index(np.array([position]), 10, 0, 0)


def test_mixed_seeds_depend_on_every_number_and_their_order() -> None:
    mixed = {mix_seed(a, b) for a in range(100) for b in range(100)}
    assert len(mixed) == 10_000
    assert all(0 <= value < 2**64 for value in mixed)
    assert mix_seed(-1) == mix_seed(2**64 - 1)


@law
@given(size=st.integers(0, 300), parts=st.integers(1, 40))
def test_shares_in_order_are_the_batch_and_differ_by_at_most_one(size: int, parts: int) -> None:
    batch = np.arange(size, dtype=np.int64)
    shares = [share(batch, part, parts) for part in range(parts)]
    np.testing.assert_array_equal(np.concatenate(shares), batch)
    sizes = [len(each) for each in shares]
    assert max(sizes) - min(sizes) <= 1


@law
@given(order=orders)
def test_an_epoch_has_every_sample_once(order: DataOrder) -> None:
    for epoch in range(2):
        batches = list(islice(order.batches(epoch * order.samples_per_epoch), order.steps_per_epoch))
        indices = np.concatenate([batch.indices for batch in batches])
        assert {batch.epoch for batch in batches} == {epoch}
        assert len(indices) == order.samples_per_epoch == len(np.unique(indices))
        assert all(len(batch.indices) == order.global_batch for batch in batches[:-1])
        if order.drop_last:
            assert len(batches[-1].indices) == order.global_batch
        else:
            assert len(indices) == order.length


@law
@given(order=orders, position=st.integers(0, 1000))
def test_resuming_at_any_position_continues_identically(order: DataOrder, position: int) -> None:
    for batch in islice(order.batches(position), 12):
        resumed = order.batch_at(batch.position)
        assert (resumed.position, resumed.next_position, resumed.epoch) == (
            batch.position,
            batch.next_position,
            batch.epoch,
        )
        np.testing.assert_array_equal(resumed.indices, batch.indices)
        following = order.batch_at(batch.next_position)
        np.testing.assert_array_equal(following.indices, next(order.batches(batch.next_position)).indices)


@law
@given(order=orders, step=st.integers(0, 60))
def test_the_position_of_a_step_is_where_that_step_starts(order: DataOrder, step: int) -> None:
    batch = next(islice(order.batches(0), step, None))
    assert order.position_of_step(step) == batch.position


@law
@given(length=st.integers(1, 150), first=st.integers(1, 40), second=st.integers(1, 40), seed=seeds)
def test_another_global_batch_keeps_the_order_of_samples(length: int, first: int, second: int, seed: int) -> None:
    """Without ``drop_last``, a run that resumes with another batch size neither repeats nor skips a sample."""
    before = DataOrder(length=length, global_batch=first, seed=seed)
    after = DataOrder(length=length, global_batch=second, seed=seed)
    start = [batch.indices for batch in islice(before.batches(0), 3)]
    rest = [batch.indices for batch in islice(after.batches(sum(map(len, start))), 3)]
    whole = np.concatenate([*start, *rest])
    expected = np.concatenate([epoch_order(length, seed, epoch) for epoch in range(len(whole) // length + 1)])
    np.testing.assert_array_equal(whole, expected[: len(whole)])


@law
@given(
    order=orders,
    first=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    second=st.tuples(st.integers(1, 6), st.integers(1, 4)),
)
def test_ranks_and_accumulation_never_change_the_order(
    order: DataOrder, first: tuple[int, int], second: tuple[int, int]
) -> None:
    def read(ranks: int, accumulate: int) -> list[list[int]]:
        parts = ranks * accumulate
        return [
            [
                int(index)
                for microbatch in range(accumulate)
                for rank in range(ranks)
                for index in share(batch.indices, microbatch * ranks + rank, parts)
            ]
            for batch in islice(order.batches(0), 5)
        ]

    assert read(*first) == read(*second)


def test_drop_last_gives_whole_batches_from_a_position_between_them() -> None:
    order = DataOrder(length=23, global_batch=5, seed=0, drop_last=True)
    batch = order.batch_at(17)
    assert (batch.position, batch.epoch, len(batch.indices)) == (20, 1, 5)
    assert [each.position for each in islice(order.batches(7), 4)] == [7, 12, 20, 25]


def test_chunks_are_invisible_in_a_long_epoch() -> None:
    order = DataOrder(length=40_000, global_batch=96, seed=3)
    indices = np.concatenate([batch.indices for batch in islice(order.batches(0), order.steps_per_epoch)])
    np.testing.assert_array_equal(indices, epoch_order(40_000, 3))


def test_without_shuffle_samples_come_in_their_own_order() -> None:
    order = DataOrder(length=5, global_batch=3, seed=0, shuffle=False)
    assert [batch.indices.tolist() for batch in islice(order.batches(0), 4)] == [[0, 1, 2], [3, 4]] * 2


def test_refuses_an_empty_set_and_batches_that_cannot_be() -> None:
    with pytest.raises(DataError, match="0 samples"):
        DataOrder(length=0, global_batch=4, seed=0)
    with pytest.raises(UsageError, match="global_batch = 0"):
        DataOrder(length=4, global_batch=0, seed=0)
    with pytest.raises(DataError, match=r"8 is more than the 5 samples.*\n.*\n.*at most 5"):
        DataOrder(length=5, global_batch=8, seed=0, drop_last=True)
    with pytest.raises(UsageError, match="position = -1"):
        DataOrder(length=5, global_batch=2, seed=0).batch_at(-1)
    assert DataOrder(length=5, global_batch=8, seed=0).steps_per_epoch == 1
