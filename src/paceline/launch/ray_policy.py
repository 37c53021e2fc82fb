"""What happens when hosts of a run on Ray have ended: the run leaves with a code, or all hosts start again.

    refused by any host              leaves with 2
    done on any host                 leaves with 0
    a host lost, or killed           starts again, as often as ``recovery`` of the config allows
    saved because something asked    starts again, at most ``--max-requeues`` times; after ``cancel`` it leaves with 75
    anything else                    leaves with the code of the launchers, who have restarted ranks themselves

Pure: no Ray, no clock, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.sections import RecoveryConfig
from paceline.health.diagnosis import FailedAttempt, Restart, TrainedSteps, after_failure
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The run ends with a code."""

    code: int
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """All hosts start again from the newest checkpoint; ``attempt``: the one that failed, where that counts."""

    words: str
    attempt: FailedAttempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """How often a run may start again, and what it has used: attempts that failed, and preemptions."""

    policy: RecoveryConfig
    failed: tuple[FailedAttempt, ...] = ()
    preempted: int = 0
    max_requeues: int = 10


def after_end(
    ends: Sequence[HostEnd], steps: TrainedSteps, budget: RestartBudget, *, options: RayOptions, is_cancelled: bool
) -> Leave | StartAgain:
    """Decides about a run whose hosts have all ended; ``steps`` says how far it came."""
    codes = {end.code for end in ends}
    if REFUSED in codes:
        return Leave(code=REFUSED)
    if DONE in codes:
        return Leave(code=DONE)
    if is_cancelled:
        return Leave(code=PREEMPTED if PREEMPTED in codes else _code_of(ends))
    # Without launchers on the hosts nobody else has started a rank again that failed.
    is_failure = options.actor == "rank" and PREEMPTED not in codes
    cause = next((end for end in ends if end.is_lost), ends[0] if is_failure else None)
    if cause is not None:
        return _after_failure(cause, ends, steps, budget)
    if PREEMPTED in codes:
        if budget.preempted < budget.max_requeues:
            return StartAgain(words=f"the run was asked to leave and saved after step {steps.last_step}")
        return Leave(code=PREEMPTED, words=f"made room, and not started again: --max-requeues is {budget.max_requeues}")
    return Leave(code=_code_of(ends))


def _after_failure(
    cause: HostEnd, ends: Sequence[HostEnd], steps: TrainedSteps, budget: RestartBudget
) -> Leave | StartAgain:
    attempt = FailedAttempt(
        first_step=steps.first_step,
        kind="killed" if cause.is_lost else "error",
        rank=list(ends).index(cause),
        step=steps.last_step,
        message=str(cause),
    )
    decision = after_failure(budget.policy, (*budget.failed, attempt))
    if isinstance(decision, Restart):
        count = f"restart {decision.number} of {budget.policy.max_restarts}"
        return StartAgain(words=f"{attempt} ({count})", attempt=attempt)
    code = decision.exit_code(_code_of(ends))
    return Leave(code=code, words=f"{attempt}; {decision.reason}" if decision.reason else str(attempt))


def _code_of(ends: Sequence[HostEnd]) -> int:
    """Returns the code that says most: a launcher that lost another one leaves with 1."""
    codes = [end.code for end in ends if end.code is not None and end.code <= _BY_SIGNAL]
    special = [code for code in codes if code not in (DONE, FAILED)]
    return NO_PROGRESS if NO_PROGRESS in special else special[0] if special else FAILED
