"""Attempt after attempt: a run whose ranks failed is started again from its newest checkpoint, while that helps.

What to do is decided by ``train/survive/recovery.py``; here it is done, and told in one sentence:

    rank 1 was killed by SIGKILL after step 37; restarting 4 ranks from step 30 (restart 1 of 3)

From the failure to the first new step: the agent looks every 50 ms, ends the other ranks, meets its new ranks (forked
from a process that has torch loaded, see ``warm_server.py``), and these load the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.run.codes import HUNG, NO_PROGRESS
from paceline.run.failure import Failure, RunFailedError
from paceline.run.progress import read_progress
from paceline.train.survive.recovery import Attempt, Incident, Restart, RestartPolicy, Stop, after_failure

_DURATION = re.compile(r", for \d+\.\d s(?=\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Where an attempt starts: a checkpoint, or the beginning without one; ``note`` tells what was passed over."""

    checkpoint: Path | None
    step: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartNote:
    """What a restarted attempt writes down: which restart it is, of how many, and what ended the one before."""

    number: int
    of: int
    reason: str


class Start(Protocol):
    """Starts the ranks and returns when all are done. Raises RunFailedError when one fails."""

    def __call__(self, checkpoint: Path | None, restart: RestartNote | None) -> None:
        """Runs one attempt from a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What supervision asks of whoever composes the run.

    ``find`` returns where to start from; ``say`` tells the user; ``halve`` halves the microbatch of the run's config,
    and says whether it could.
    """

    find: Callable[[], StartingPoint]
    say: Callable[[str], None]
    halve: Callable[[], bool]


def supervise(
    start: Start, first: Path | None, folder: Path, policy: RestartPolicy, around: Surroundings, *, ranks: str
) -> None:
    """Runs attempts until one is done. Raises the last one's error, with why there is no other.

    ``first`` is the checkpoint of the first attempt; ``ranks`` names the ranks in what is told.
    """
    attempts: list[Attempt] = []
    checkpoint, note = first, None
    while True:
        try:
            start(checkpoint, note)
            return
        except RunFailedError as error:
            attempts.append(attempt_of(error.cause, folder))
            decision = after_failure(policy, attempts)
            if isinstance(decision, Restart) and decision.halves_microbatch and not around.halve():
                decision = Stop(reason="not started again: the microbatch cannot be halved")
            if isinstance(decision, Stop):
                raise _with_reason(error, decision) from error
            what = sentence_of(attempts[-1].incident)
        point = around.find()
        if point.note:
            around.say(point.note)
        checkpoint = point.checkpoint
        note = RestartNote(number=decision.number, of=policy.max_restarts, reason=what)
        where = f"from step {point.step}" if checkpoint is not None else "from the beginning: there is no checkpoint"
        smaller = " with half the microbatch" if decision.halves_microbatch else ""
        around.say(f"{what}; restarting {ranks} {where}{smaller} (restart {decision.number} of {policy.max_restarts})")


def attempt_of(cause: Failure, folder: Path) -> Attempt:
    """Returns the attempt that a failure ended, with how far its rank had come."""
    progress = read_progress(folder)
    first = min((each.first_step for each in progress.values()), default=0)
    own = progress.get(cause.rank)
    step = own.last_step if own is not None else max((each.last_step for each in progress.values()), default=0)
    incident = Incident(kind=cause.kind, rank=cause.rank, step=step, message=_headline(cause))
    return Attempt(first_step=first, incident=incident)


def sentence_of(incident: Incident) -> str:
    """Tells an incident, and after which step it came."""
    where = f"after step {incident.step}" if incident.step else "before its first step"
    return f"{incident.message.rstrip('.')} {where}"


def _headline(cause: Failure) -> str:
    """Returns the first line of a failure, without where in a step it was and how long: never the same twice."""
    first = str(cause).splitlines()[0]
    return _DURATION.sub("", first) if cause.kind == "hang" else first.partition(" in phase ")[0]


def _with_reason(error: RunFailedError, decision: Stop) -> RunFailedError:
    if not decision.reason:
        return error
    code = HUNG if error.code == HUNG else NO_PROGRESS if decision.gives_up else error.code
    return RunFailedError(f"{error}\n  {decision.reason}", error.cause, code)
