"""The batch algebra: laws, and fixes that work."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config.layout import batch_plan, check_batch, resolve_batch
from paceline.config.schema import TrainConfig
from paceline.errors import ConfigError
from paceline.plan.plan import BatchPlan

# A test asserts no timing: a busy machine must not fail a law.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

counts = st.integers(1, 400)
maybe = st.none() | counts


def suggestions(fix: str) -> list[tuple[str, int]]:
    """Reads ``try train.global_batch = 63 or 66, or parallel.ranks = 2`` back."""
    return [
        (key, int(number))
        for key, numbers in re.findall(r"(?:train|parallel)\.(\w+) = (\d+(?: or \d+)*)", fix)
        for number in numbers.split(" or ")
    ]


@relaxed
@given(microbatch=counts, accumulate=counts, ranks=counts)
def test_any_one_of_three_is_derived_from_the_others(microbatch: int, accumulate: int, ranks: int) -> None:
    product = microbatch * accumulate * ranks
    plan = BatchPlan(global_batch=product, microbatch=microbatch, accumulate=accumulate, ranks=ranks)
    assert resolve_batch(product, microbatch, accumulate, ranks) == plan
    assert resolve_batch(None, microbatch, accumulate, ranks) == plan
    assert resolve_batch(product, None, accumulate, ranks) == plan
    assert resolve_batch(product, microbatch, None, ranks) == plan


@relaxed
@given(global_batch=maybe, microbatch=maybe, accumulate=maybe, ranks=counts)
def test_a_plan_keeps_what_was_given_and_the_law(
    global_batch: int | None, microbatch: int | None, accumulate: int | None, ranks: int
) -> None:
    try:
        plan = resolve_batch(global_batch, microbatch, accumulate, ranks)
    except ConfigError:
        assert check_batch(global_batch, microbatch, accumulate, ranks)
        return
    assert plan.global_batch == plan.microbatch * plan.accumulate * plan.ranks
    assert plan.samples_per_rank * ranks == plan.global_batch
    assert plan.ranks == ranks
    assert global_batch in (None, plan.global_batch)
    assert microbatch in (None, plan.microbatch)
    assert accumulate in (None, plan.accumulate)
    assert min(plan.global_batch, plan.microbatch, plan.accumulate) >= 1


@relaxed
@given(global_batch=maybe, microbatch=maybe, accumulate=maybe, ranks=counts)
def test_it_is_refused_exactly_when_no_whole_numbers_fit(
    global_batch: int | None, microbatch: int | None, accumulate: int | None, ranks: int
) -> None:
    total = 64 if global_batch is None and microbatch is None else global_batch
    if total is None:
        possible = True
    elif microbatch is not None and accumulate is not None:
        possible = total == microbatch * accumulate * ranks
    else:
        possible = total % ((microbatch or 1) * (accumulate or 1) * ranks) == 0
    assert (not check_batch(global_batch, microbatch, accumulate, ranks)) == possible


@relaxed
@given(global_batch=maybe, microbatch=maybe, accumulate=maybe, ranks=maybe)
def test_every_suggestion_works(
    global_batch: int | None, microbatch: int | None, accumulate: int | None, ranks: int | None
) -> None:
    for problem in check_batch(global_batch, microbatch, accumulate, ranks):
        found = suggestions(problem.fix)
        assert found, problem
        for name, value in found:
            asked = {"global_batch": global_batch, "microbatch": microbatch, "accumulate": accumulate, "ranks": ranks}
            assert check_batch(**{**asked, name: value}) == [], (problem, name, value)


@relaxed
@given(global_batch=st.integers(1, 60), microbatch=maybe, accumulate=maybe)
def test_without_ranks_a_problem_means_that_no_number_of_ranks_works(
    global_batch: int, microbatch: int | None, accumulate: int | None
) -> None:
    some_fit = any(not check_batch(global_batch, microbatch, accumulate, ranks) for ranks in range(1, global_batch + 1))
    assert (not check_batch(global_batch, microbatch, accumulate, None)) == some_fit


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        ((None, None, None, 1), (64, 64, 1)),
        ((None, None, None, 4), (64, 16, 1)),
        ((None, None, 2, 4), (64, 8, 2)),
        ((None, 8, None, 3), (24, 8, 1)),
        ((96, None, None, 4), (96, 24, 1)),
        ((96, 8, None, 4), (96, 8, 3)),
    ],
)
def test_defaults(asked: tuple[int | None, int | None, int | None, int], plan: tuple[int, int, int]) -> None:
    found = resolve_batch(*asked)
    assert (found.global_batch, found.microbatch, found.accumulate) == plan


def test_a_batch_that_cannot_be_divided_names_the_nearest_that_can() -> None:
    (problem,) = check_batch(100, None, None, 3)
    assert problem.what == "train.global_batch = 100 is not a multiple of parallel.ranks = 3"
    assert problem.fix == "try train.global_batch = 99 or 102, or parallel.ranks = 2 or 4"


def test_the_default_batch_is_named_as_such() -> None:
    (problem,) = check_batch(None, None, None, 3)
    assert "train.global_batch = 64 (the default)" in problem.what


def test_a_contradiction_shows_all_values() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch(64, 8, 2, 3)
    (problem,) = caught.value.problems
    assert problem.what == (
        "train.global_batch = 64 is not train.microbatch = 8 x train.accumulate = 2 x parallel.ranks = 3, which is 48"
    )
    assert suggestions(problem.fix) == [("global_batch", 48), ("ranks", 4)]


def test_more_ranks_than_samples() -> None:
    (problem,) = check_batch(4, None, None, 8)
    assert problem.what == "parallel.ranks = 8 is more than train.global_batch = 4"
    assert suggestions(problem.fix) == [("global_batch", 8), ("ranks", 4)]


def test_every_count_below_one_is_reported() -> None:
    assert len(check_batch(0, -1, 0, 0)) == 4


def test_batch_of_a_config() -> None:
    assert batch_plan(TrainConfig(global_batch=32, microbatch=4), ranks=2).accumulate == 4
