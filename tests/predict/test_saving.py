"""How often to save: the formula against a search over intervals, and against runs that are played with failures."""

from __future__ import annotations

import random

import pytest

from paceline.errors import UsageError
from paceline.predict.formulas.saving import best_interval, lost_share, time_between_failures


@pytest.mark.parametrize(("save_s", "failure_s"), [(1.0, 1000.0), (40.0, 2.28e7), (60.0, 4e5)])
def test_no_other_interval_loses_less(save_s: float, failure_s: float) -> None:
    best = best_interval(save_s, failure_s)
    least = lost_share(best, save_s=save_s, failure_s=failure_s)
    for factor in (0.25, 0.5, 0.9, 1.1, 2.0, 4.0):
        assert lost_share(factor * best, save_s=save_s, failure_s=failure_s) > least


def play(interval_s: float, save_s: float, failure_s: float, restart_s: float, saves: int) -> float:
    """Returns the share of time that is lost by a run whose failures come at random moments."""
    numbers = random.Random(0)
    clock, kept = 0.0, 0
    failure = numbers.expovariate(1 / failure_s)
    while kept < saves:
        end = clock + interval_s + save_s
        if failure < end:  # all since the last save is gone
            clock = failure + restart_s
            failure = clock + numbers.expovariate(1 / failure_s)
        else:
            clock, kept = end, kept + 1
    return 1 - kept * interval_s / clock


def test_the_share_is_that_of_runs_that_fail_at_random() -> None:
    costs = {"save_s": 2.0, "failure_s": 4000.0, "restart_s": 20.0}
    interval = best_interval(2.0, 4000.0)
    played = play(interval, saves=20_000, **costs)
    assert lost_share(interval, **costs) == pytest.approx(played, rel=0.05)


def test_more_devices_fail_more_often() -> None:
    assert time_between_failures(800.0, 8) == 100.0
    assert best_interval(8.0, time_between_failures(800.0, 8)) == 40.0
    assert lost_share(1e9, save_s=1.0, failure_s=10.0) == 1.0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="0 devices"):
        time_between_failures(1.0, 0)
    with pytest.raises(UsageError, match=r"time of a save = 0\.0"):
        best_interval(0.0, 1.0)
    with pytest.raises(UsageError, match="interval between saves = nan"):
        lost_share(float("nan"), save_s=1.0, failure_s=1.0)
