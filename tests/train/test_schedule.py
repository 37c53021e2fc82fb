"""Learning rates as a pure function of progress."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import plan_of

from paceline.config import config_from_dict
from paceline.config.schema import RateKind
from paceline.train.assemble import build_schedule
from paceline.train.optim import RateSchedule

KINDS: tuple[RateKind, ...] = get_args(RateKind)
FALLING = tuple(kind for kind in KINDS if kind != "range")  # a range ends at its peak


def rates(schedule: RateSchedule, steps: int) -> list[float]:
    return [schedule.factor(before=step, after=step + 1) for step in range(steps)]


def test_constant() -> None:
    assert rates(RateSchedule(length=4), 6) == [1.0] * 6


def test_linear_falls_by_equal_steps_to_the_final_ratio() -> None:
    assert rates(RateSchedule(kind="linear", length=4, final_ratio=0.2), 6) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = rates(RateSchedule(kind="cosine", length=4, final_ratio=0.5), 5)
    quarter = 0.5 + 0.25 * (1 + math.cos(math.pi / 4))
    assert found == pytest.approx([1.0, quarter, 0.75, 1.5 - quarter, 0.5])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_rises_to_the_peak_and_never_starts_at_zero(kind: Any) -> None:
    """The first step uses 1/w: a rate of 0 would waste it. The last one of the warm-up already has the peak."""
    found = rates(RateSchedule(kind=kind, warmup=4, length=12), 5)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_the_curve_begins_where_the_warm_up_ends() -> None:
    found = rates(RateSchedule(kind="linear", warmup=2, length=6), 7)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_warm_up_as_long_as_the_schedule() -> None:
    assert rates(RateSchedule(kind="cosine", warmup=3, length=3), 3) == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_one_cycle_rises_over_three_tenths_and_falls_over_the_rest() -> None:
    schedule = RateSchedule(kind="one_cycle", length=20, final_ratio=0.1)
    found = rates(schedule, 21)
    assert found[0] == pytest.approx(1 / 25)
    assert found[3] == pytest.approx((1 + 1 / 25) / 2)
    assert found.index(max(found)) == 6
    assert found[6] == pytest.approx(1.0)
    assert found[13] == pytest.approx(0.55)
    assert found[20] == pytest.approx(0.1)
    assert found[:7] == sorted(found[:7])
    assert found[6:] == sorted(found[6:], reverse=True)


def test_one_cycle_takes_the_warm_up_for_its_rise() -> None:
    found = rates(RateSchedule(kind="one_cycle", warmup=10, length=20), 20)
    assert found.index(max(found)) == 10


def config(**schedule: Any) -> Any:
    return config_from_dict(
        {
            "model": {"kind": "mlp"},
            "data": {"kind": "synthetic_classification", "samples": 50, "eval_fraction": 0.0},
            "train": {"epochs": 3, "global_batch": 8},
            "optim": {"schedule": schedule},
        }
    )


@pytest.mark.parametrize(("unit", "length"), [("steps", 21.0), ("samples", 150.0)])
def test_without_a_length_the_schedule_spans_the_run(unit: str, length: float) -> None:
    asked = config(kind="cosine", unit=unit)
    plan = plan_of(asked, ranks=2, train_samples=50, eval_samples=0)
    assert build_schedule(asked, plan) == RateSchedule(kind="cosine", unit=unit, length=length)  # type: ignore[arg-type]


def test_every_field_of_the_config_arrives() -> None:
    asked = config(kind="linear", unit="samples", warmup=5.0, length=70.0, final_ratio=0.25)
    plan = plan_of(asked, ranks=1, train_samples=50, eval_samples=0)
    expected = RateSchedule(kind="linear", unit="samples", warmup=5.0, length=70.0, final_ratio=0.25)
    assert build_schedule(asked, plan) == expected


@st.composite
def schedules(draw: st.DrawFn, kinds: Sequence[RateKind] = KINDS) -> RateSchedule:
    length = draw(st.integers(1, 2000))
    return RateSchedule(
        kind=draw(st.sampled_from(kinds)),
        warmup=draw(st.one_of(st.just(0), st.integers(1, length))),
        length=length,
        final_ratio=draw(st.floats(0.0, 1.0)),
    )


@given(schedules(), st.integers(0, 2100))
def test_every_step_of_the_run_has_a_rate_above_zero_and_at_most_the_peak(schedule: RateSchedule, before: int) -> None:
    factor = schedule.factor(before=before, after=before + 1)
    assert 0.0 <= factor <= 1.0
    if before < schedule.length or schedule.final_ratio > 0:
        assert factor > 0.0


@given(schedules(FALLING), st.integers(1, 1000))
def test_beyond_its_end_a_schedule_stays_at_the_final_ratio(schedule: RateSchedule, beyond: int) -> None:
    before = schedule.length + beyond
    final = 1.0 if schedule.kind == "constant" else schedule.final_ratio
    assert schedule.factor(before=before, after=before + 1) == pytest.approx(final, abs=1e-12)


@given(schedules(FALLING))
def test_the_pieces_of_a_schedule_meet(schedule: RateSchedule) -> None:
    """Around every joint (end of the rise, end of the curve) an ever smaller step changes the rate ever less."""
    rise = schedule.warmup or (0.3 * schedule.length if schedule.kind == "one_cycle" else 0.0)
    small = 1e-9 * min(piece for piece in (rise, schedule.length - rise) if piece > 0)
    for joint in {rise, float(schedule.length)} - {0.0}:
        if rise == schedule.length and schedule.kind != "constant":
            continue  # a warm-up up to the end leaves no room to come down from the peak
        below = schedule.factor(before=joint - small, after=joint)
        above = schedule.factor(before=joint + small, after=joint + 2 * small)
        assert below == pytest.approx(above, abs=1e-6)


@st.composite
def groupings(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    total = draw(st.integers(1, 600))

    def cuts() -> list[int]:
        inner = draw(st.sets(st.integers(1, total), max_size=40)) | {0, total}
        return sorted(inner)

    return total, cuts(), cuts()


@given(groupings(), schedules())
def test_the_rate_depends_on_the_samples_seen_and_not_on_how_they_were_grouped(
    grouping: tuple[int, list[int], list[int]], schedule: RateSchedule
) -> None:
    """Two runs that meet at a number of samples have the same rate there, however they came there."""
    _, first, second = grouping
    starts = [{a: schedule.factor(before=a, after=a + 1) for a in cuts[:-1]} for cuts in (first, second)]
    for place in starts[0].keys() & starts[1].keys():
        assert starts[0][place] == starts[1][place]


@given(groupings(), schedules())
def test_the_rate_summed_over_samples_is_that_of_single_samples(
    grouping: tuple[int, list[int], list[int]], schedule: RateSchedule
) -> None:
    """Summed over samples, a grouping changes the rates by no more than its largest group times their variation.

    A schedule that counted groups (or ranks, or microbatches) instead of samples would be off by far more.
    """
    total, cuts, _ = grouping
    grouped = sum((b - a) * schedule.factor(before=a, after=b) for a, b in itertools.pairwise(cuts))
    single = sum(schedule.factor(before=a, after=a + 1) for a in range(total))
    variation = 2.0  # at most once up and once down
    largest = max(b - a for a, b in itertools.pairwise(cuts))
    assert abs(grouped - single) <= largest * variation + 1e-9


@given(kind=st.sampled_from(KINDS), warmup=st.integers(0, 3))
def test_a_schedule_says_that_it_is_constant_where_all_its_rates_are_one(kind: Any, warmup: int) -> None:
    schedule = RateSchedule(kind=kind, warmup=warmup, length=8)
    is_all_one = rates(schedule, 8) == [1.0] * 8
    # One step of warm-up reaches the peak at once: a schedule may be constant without saying so, never the other way.
    assert schedule.is_constant <= is_all_one
    assert schedule.is_constant or kind != "constant" or warmup
