"""How often to save: figures by hand, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from paceline.errors import UsageError
from paceline.predict.formulas.saving import best_interval, lost_share, time_between_failures


def test_figures_by_hand() -> None:
    assert time_between_failures(1000.0, 1) == 1000.0
    assert time_between_failures(1000.0, 8) == 125.0
    assert best_interval(2.0, 100.0) == 20.0
    assert lost_share(20.0, save_s=2.0, failure_s=100.0) == pytest.approx(0.1 + 0.1)
    assert lost_share(20.0, save_s=2.0, failure_s=100.0, restart_s=10.0) == pytest.approx(0.3)
    assert lost_share(1.0, save_s=2.0, failure_s=100.0) == 1.0
    assert lost_share(20.0, save_s=0.0, failure_s=100.0) == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("time between failures of a device", lambda value: time_between_failures(value, 2)),
        ("time of a save", lambda value: best_interval(value, 1.0)),
        ("time between failures", lambda value: best_interval(1.0, value)),
        ("interval between saves", lambda value: lost_share(value, save_s=1.0, failure_s=1.0)),
        ("time between failures", lambda value: lost_share(1.0, save_s=1.0, failure_s=value)),
    ],
)
def test_what_is_no_number_of_seconds_is_refused(what: str, call: Callable[[float], float], wrong: float) -> None:
    with pytest.raises(UsageError) as told:
        call(wrong)
    assert str(told.value) == f"{what} = {wrong}\n  it is a number of seconds above 0\n  give what was measured"


@pytest.mark.parametrize("devices", [0, -3])
def test_a_run_has_a_device(devices: int) -> None:
    with pytest.raises(UsageError, match=f"^{devices} devices\n  a run has at least one"):
        time_between_failures(1.0, devices)
