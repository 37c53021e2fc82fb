"""What the ends of hosts on Ray mean for their run: it leaves with a code, or an attempt has ended.

    refused by any host              leaves with 2
    done on any host                 leaves with 0
    a host lost, or killed           an attempt that failed
    saved because something asked    an attempt that made room; after ``cancel`` it leaves with 75
    anything else                    leaves with the code of the launchers, who have restarted ranks themselves

Whether another attempt follows is decided by ``health/diagnosis.py``. Pure: no Ray, no clock, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.health.diagnosis import FailedAttempt, TrainedSteps
from paceline.health.exit_codes import DONE, FAILED, NO_PROGRESS, PREEMPTED, REFUSED
from paceline.launch.ray_settings import RayOptions

_BY_SIGNAL = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnd:
    """How the command of one actor ended; ``code`` None: the actor is gone, and ``words`` say how."""

    host: str
    code: int | None
    words: str = ""

    @property
    def is_lost(self) -> bool:
        return self.code is None or self.code > _BY_SIGNAL

    def __str__(self) -> str:
        if self.code is None:
            return f"host {self.host} was lost ({self.words})" if self.words else f"host {self.host} was lost"
        if self.code > _BY_SIGNAL:
            return f"the launcher on host {self.host} was killed by signal {self.code - _BY_SIGNAL}"
        return f"host {self.host} left with exit code {self.code}"


def ended_by(
    ends: Sequence[HostEnd], steps: TrainedSteps, *, options: RayOptions, is_cancelled: bool
) -> FailedAttempt | int:
    """Returns what ended a run whose hosts have all ended, or the exit code of one that does not start again.

    ``steps`` says how far it came.
    """
    codes = {end.code for end in ends}
    for code in (REFUSED, DONE):
        if code in codes:
            return code
    if is_cancelled:
        return code_of(ends)
    # Without launchers on the hosts nobody else has started a rank again that failed.
    is_failure = options.actor == "rank" and PREEMPTED not in codes
    cause = next((end for end in ends if end.is_lost), ends[0] if is_failure else None)
    if cause is None and PREEMPTED not in codes:
        return code_of(ends)
    return FailedAttempt(
        first_step=steps.first_step,
        kind="preempted" if cause is None else "killed" if cause.is_lost else "error",
        rank=0 if cause is None else list(ends).index(cause),
        step=steps.last_step,
        message="the run was asked to leave and saved" if cause is None else str(cause),
    )


def code_of(ends: Sequence[HostEnd]) -> int:
    """Returns the code that says most: a launcher that lost another one leaves with 1."""
    codes = [end.code for end in ends if end.code is not None and end.code <= _BY_SIGNAL]
    special = [code for code in codes if code not in (DONE, FAILED)]
    return next((code for code in (PREEMPTED, NO_PROGRESS) if code in special), special[0] if special else FAILED)
