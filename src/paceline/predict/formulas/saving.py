"""How often a run should be saved: the interval that loses the least time to saves and failures.

A save stops training for t_save seconds, a failure comes every t_fail seconds on average, and a restart takes
t_restart seconds. A run that saves every I seconds repeats half an interval after a failure, so that it loses this
share of its time:

    lost = t_save / I  +  (I / 2 + t_restart) / t_fail          smallest for  I = sqrt(2 t_save t_fail)

This is Young's approximation (1974), which Daly (2006) refines; it holds where I is much shorter than t_fail. Devices
fail independently: of N devices one fails N times as often. A save in the background takes longer than it stops
training, and the interval is never shorter than that.

Snapshots in the memory of hosts: two of what a host's ranks hold, the newest and the one that is being made, as many
for each copy that it has of another host's, and the memory that its ranks copy to. Training waits until the state is
copied once: read and written where it lies. On a GPU that is what the bus to the host cannot take away beside the
passes of one step, most of the step's time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError

BESIDE_SHARE = 0.7  # of a step: what is copied beside its passes in this time is copied before its update


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


def refined_interval(save_s: float, failure_s: float) -> float:
    """Returns the interval between saves that loses least, by Daly's formula."""
    ratio = save_s / (2.0 * failure_s)
    root = best_interval(save_s, failure_s)
    return root * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_s if ratio < 1.0 else failure_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    """What snapshots take: bytes that a rank copies, bytes of a host, and seconds in which training stands still."""

    rank_bytes: float
    host_bytes: float
    blocked_s: float

    @classmethod
    def of(
        cls,
        state_bytes: float,
        *,
        ranks: int,
        node_ranks: int,
        copies: int,
        bytes_per_s: float = math.inf,
        beside_bytes: float = 0.0,
    ) -> SnapshotCost:
        """Prices snapshots of a state that all ``ranks`` write together; ``bytes_per_s`` is a device's memory.

        ``beside_bytes`` of each rank go to the host beside the passes of one step.
        """
        own, hosts = state_bytes / ranks, max(1, ranks // node_ranks)
        generations = 1 + 2 * (1 + min(copies, hosts - 1))
        blocked = 2.0 * max(0.0, own - beside_bytes) / bytes_per_s
        return cls(rank_bytes=own, host_bytes=own * node_ranks * generations, blocked_s=blocked)


def lost_share(interval_s: float, *, save_s: float, failure_s: float, restart_s: float = 0.0) -> float:
    """Returns the share of time that saves, repeated steps and restarts take; at most 1."""
    _check_positive("interval between saves", interval_s)
    _check_positive("time between failures", failure_s)
    return min(1.0, save_s / interval_s + (interval_s / 2 + restart_s) / failure_s)


def _check_positive(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"{what} = {seconds}\n  it is a number of seconds above 0\n  give what was measured")
