"""How often a run should be saved: the interval that loses the least time to saves and failures.

A save stops training for t_save seconds, a failure comes every t_fail seconds on average, and a restart takes
t_restart seconds. A run that saves every I seconds repeats half an interval after a failure, so that it loses this
share of its time:

    lost = t_save / I  +  (I / 2 + t_restart) / t_fail          smallest for  I = sqrt(2 t_save t_fail)

This is Young's approximation (1974), which Daly (2006) refines; it holds where I is much shorter than t_fail. Devices
fail independently: of N devices one fails N times as often.
"""

from __future__ import annotations

import math

from paceline.errors import UsageError


def time_between_failures(device_s: float, devices: int) -> float:
    """Returns the mean time between failures of a run, from that of one device; any failure stops all devices."""
    if devices < 1:
        raise UsageError(f"{devices} devices\n  a run has at least one\n  give the number of all devices")
    _check_positive("time between failures of a device", device_s)
    return device_s / devices


def best_interval(save_s: float, failure_s: float) -> float:
    """Returns the interval between saves that loses least, by Young's formula."""
    _check_positive("time of a save", save_s)
    _check_positive("time between failures", failure_s)
    return math.sqrt(2 * save_s * failure_s)


def lost_share(interval_s: float, *, save_s: float, failure_s: float, restart_s: float = 0.0) -> float:
    """Returns the share of time that saves, repeated steps and restarts take; at most 1."""
    _check_positive("interval between saves", interval_s)
    _check_positive("time between failures", failure_s)
    return min(1.0, save_s / interval_s + (interval_s / 2 + restart_s) / failure_s)


def _check_positive(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"{what} = {seconds}\n  it is a number of seconds above 0\n  give what was measured")
