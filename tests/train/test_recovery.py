"""Decisions about what went wrong: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.config.sections import RecoveryConfig
from paceline.health.diagnosis import Stop
from paceline.train.survive.recovery import GoBack, GoOn, Spike, find_spike, on_bad_steps, on_spike


def spike(losses: Sequence[float], loss: float, **settings: Any) -> Spike | None:
    policy = RecoveryConfig(spike_window=10, **{f"spike_{name}": value for name, value in settings.items()})
    return find_spike(policy, losses, loss)


def test_a_spike_is_far_above_the_median() -> None:
    losses = [2.0, 1.9, 2.1, 2.0, 2.2]
    assert spike(losses, 6.0) is None
    assert spike(losses, 6.01) == Spike(loss=6.01, median=2.0, times=pytest.approx(3.005))
    assert spike(losses[:4], 100.0) is None  # half a window must be there
    assert spike([50.0] * 5 + losses * 2, 6.01) is not None  # only the window counts
    assert spike([-2.0] * 5, 1.0) is None
    assert spike([-2.0] * 5, 2.5) is not None
    assert spike([0.0] * 5, 0.1) == Spike(loss=0.1, median=0.0, times=math.inf)
    assert str(spike(losses, 9.0)) == "9 after a median of 2"


def test_a_loss_that_is_not_finite_is_a_spike_and_not_part_of_the_median() -> None:
    assert spike([2.0] * 5, math.nan) is not None
    assert spike([2.0] * 5 + [math.inf] * 4, 7.0) is not None
    assert spike([math.nan] * 9, 7.0) is None


def test_deviations_are_robust() -> None:
    losses = [2.0, 2.1, 1.9, 2.05, 1.95, 90.0]
    assert spike(losses, 2.3, by="deviations", threshold=4.0) is None
    assert spike(losses, 3.0, by="deviations", threshold=4.0) is not None
    assert spike([2.0] * 6, 2.0, by="deviations") is None
    assert spike([2.0] * 6, 2.1, by="deviations") is not None


SPIKE = Spike(loss=9.0, median=2.0, times=4.5)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("ignore", GoOn()),
        ("note", GoOn(is_noted=True)),
        ("roll_back", GoBack(reason="the loss jumped to 9 after a median of 2", skips_data=True)),
        ("lower_rate", GoBack(reason="the loss jumped to 9 after a median of 2", skips_data=False, rate_factor=0.25)),
        ("stop", Stop(reason="the loss jumped to 9 after a median of 2")),
    ],
)
def test_what_is_done_about_a_spike(choice: Any, expected: object) -> None:
    policy = RecoveryConfig(on_spike=choice, rate_factor=0.25)
    assert on_spike(policy, SPIKE, num_roll_backs=0, has_checkpoint=True) == expected


def test_a_run_goes_back_only_so_often_and_only_to_a_checkpoint() -> None:
    policy = RecoveryConfig(on_spike="roll_back", max_roll_backs=2)
    often = on_spike(policy, SPIKE, num_roll_backs=2, has_checkpoint=True)
    assert isinstance(often, Stop)
    assert "recovery.max_roll_backs = 2 times" in often.reason
    nowhere = on_spike(policy, SPIKE, num_roll_backs=0, has_checkpoint=False)
    assert isinstance(nowhere, Stop)
    assert "no checkpoint yet" in nowhere.reason


def bad(on_nan: Any, num_in_a_row: int) -> object:
    policy = RecoveryConfig(on_nan=on_nan)
    return on_bad_steps(policy, num_in_a_row=num_in_a_row, limit=3, num_roll_backs=0, has_checkpoint=True)


def test_what_is_done_about_gradients_that_are_not_finite() -> None:
    assert bad("stop", 1) == Stop(reason="recovery.on_nan = stop")
    assert bad("skip", 2) == bad("roll_back", 2) == bad("lower_rate", 2) == GoOn()
    assert bad("skip", 3) == Stop()
    assert bad("roll_back", 3) == GoBack(reason="3 steps in a row had gradients that are not finite", skips_data=True)
    assert isinstance(bad("lower_rate", 3), GoBack)
