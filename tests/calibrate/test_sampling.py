"""How samples are summed up, and which machines are refused."""

from __future__ import annotations

import pytest

from paceline.calibrate.timing import Stopwatch, check_quiet, processor_share, summarize
from paceline.errors import UsageError


def test_the_median_counts_and_the_quartiles_are_the_spread() -> None:
    assert summarize([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, pytest.approx((52.0 - 1.5) / 3.0))
    assert summarize([2.0]) == (2.0, 0.0)


def test_a_step_runs_as_often_as_was_asked_and_ranks_meet_before_each_sample() -> None:
    ran: list[str] = []
    watch = Stopwatch(samples=3, meet=lambda: ran.append("meet"), finish=lambda: ran.append("finish"))
    assert watch.time_together(lambda: ran.append("step"), repeats=2, name="steps") > 0
    assert list(watch.spreads) == ["steps"]
    once = ["meet", "step", "step", "finish"]
    assert ran == ["step", "finish", *once, *once, *once]


def test_a_short_step_is_repeated_until_the_clock_can_tell() -> None:
    count = [0]

    def step() -> None:
        count[0] += 1

    Stopwatch(samples=2).time(step)
    assert count[0] > 20


def test_a_step_that_takes_too_long_is_sampled_three_times_and_ranks_meet_once() -> None:
    ran: list[str] = []
    watch = Stopwatch(samples=50, most_s=0.0, meet=lambda: ran.append("meet"))
    watch.time(lambda: (ran.append("step"), sum(range(200_000))))
    assert ran == ["step", "meet", *["step"] * 4]


def test_a_thread_that_works_all_the_time_has_a_share_of_the_processor() -> None:
    assert 0 < processor_share(lambda: sum(range(1000)), seconds=0.01) <= 1


def test_a_quiet_machine_passes_also_with_one_thing_that_spreads() -> None:
    check_quiet({"a": 0.01, "b": 0.02, "c": 0.9}, share=0.99)
    check_quiet({}, share=1.0)


@pytest.mark.parametrize(
    ("spreads", "share", "told"),
    [
        ({"a": 0.3, "fp32 64x64x64": 0.5, "c": 0.01}, 1.0, "spread by 30 %.*fp32 64x64x64 50 %"),
        ({"a": 0.01}, 0.5, "had the processor 50 % of the time"),
    ],
)
def test_a_noisy_machine_is_refused_with_the_spread(spreads: dict[str, float], share: float, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_quiet(spreads, share)
