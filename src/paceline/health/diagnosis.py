"""One diagnosis of a run whose ranks died or hung: which rank caused it, what to tell, and whether to start again.

    failures of ranks        diagnose(failures, ...)              -> Diagnosis: cause, message, exit code
    diagnosis and progress   FailedAttempt.of(...)                -> FailedAttempt
    all failed attempts      after_failure(policy, attempts)      -> Restart | Stop

When one rank fails the others lose their connection and fail too, or are ended. So the ranks are blamed in this order:

    killed   by a signal that nobody sends because another rank failed, such as SIGKILL or SIGSEGV
    raised   an error of its own
    died     without a word: an exit code and nothing else, or an abort
    stuck    waited for another rank until the time was over
    ended    by SIGTERM or its like: by somebody else, or by the agent once another rank has failed
    lost     the connection to another rank

A run that is started again must get further than before; an error that comes twice at the same step comes a third time.
Progress refills the budget of restarts: one that lies ``recovery.restart_window`` steps back is not counted any more.
Hosts that come or go, while enough are left, are no failure and cost nothing.
Nothing here reads files or a clock: the launchers of several hosts, who ask with the same values, agree without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, get_args

from paceline.health.exit_codes import FAILED, HUNG, NO_PROGRESS, REFUSED
from paceline.health.failure import Cause, Failure, FailureKind
from paceline.untrusted import parse_json_object

if TYPE_CHECKING:
    from paceline.config.sections import RecoveryConfig  # with pydantic, which a command's help must not wait for

_RANK = re.compile(r"\branks? \(?(\d+)")
_ENOUGH = "not started again: --max-requeues is"
_DURATION = re.compile(r", for \d+\.\d s(?:(?=\))| \(process \d+\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why the ranks of a run ended: the failure that led to the others, what the user is told, and the exit code."""

    cause: Failure
    message: str
    code: int


def diagnose(failures: Iterable[Failure], folder: Path, *, is_disk_full: bool = False) -> Diagnosis:
    """Finds the cause among the failures of ranks; ``is_disk_full`` explains a rank that could not write why."""
    cause = first_cause(failures)
    if cause.is_refusal:
        return Diagnosis(cause=cause, message=cause.message, code=REFUSED)
    detail = f"\n\n{cause.traceback.rstrip()}\n" if cause.traceback else ""
    if cause.cause == "died" and is_disk_full:
        detail += f"\n  the disk of {folder} is full, so that it could not say why: free some space"
        cause = replace(cause, kind="full_disk")  # starting again would not help
    named = _RANK.search(str(cause).partition("\n")[0])  # the rank may be another than the one that told it
    log = folder / "logs" / f"rank-{cause.rank if named is None else int(named[1])}.log"
    code = HUNG if cause.kind == "hang" else FAILED
    return Diagnosis(cause=cause, message=f"{cause}{detail}\n  its log is {log}", code=code)


def first_cause(failures: Iterable[Failure]) -> Failure:
    order = get_args(Cause)
    return min(failures, key=lambda failure: (order.index(failure.cause), failure.time))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSteps:
    """The step with which an attempt began, and the last step that it trained."""

    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """One start of the ranks, and what ended it; told to the launchers of other hosts, so that all decide alike."""

    first_step: int
    kind: FailureKind
    rank: int
    step: int
    message: str
    can_halve: bool = True
    diagnosis: Diagnosis | None = field(default=None, compare=False)

    def __str__(self) -> str:
        where = f"after step {self.step}" if self.step else "before its first step"
        return f"{self.message.rstrip('.')} {where}"

    @classmethod
    def of(cls, diagnosis: Diagnosis, progress: Mapping[int, TrainedSteps], *, can_halve: bool = True) -> Self:
        """Returns the attempt that ended so. Its message leaves out what differs every time: where, for how long."""
        failure, first = diagnosis.cause, str(diagnosis.cause).splitlines()[0]
        rank = failure.rank if failure.blamed is None else failure.blamed
        steps = [each.last_step for number, each in progress.items() if number == rank or rank not in progress]
        return cls(
            first_step=min((each.first_step for each in progress.values()), default=0),
            kind=failure.kind,
            rank=rank,
            step=max(steps, default=0),
            message=_DURATION.sub("", first) if failure.kind == "hang" else first.partition(" in phase ")[0],
            can_halve=can_halve,
            diagnosis=diagnosis,
        )

    @property
    def last_step(self) -> int:
        return max(self.first_step, self.step)

    @property
    def is_sure(self) -> bool:
        """Whether the cause was seen here: ranks that only lost others leave it to the host that knows more."""
        cause = None if self.diagnosis is None else self.diagnosis.cause
        return cause is not None and (cause.kind == "hang" or cause.cause in ("killed", "raised", "died"))

    @property
    def is_killed_early(self) -> bool:
        """Whether somebody killed a rank before its first step: what an earlier step did was not why."""
        return self.kind == "killed" and "SIGKILL" in self.message and self.step <= self.first_step

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        told = parse_json_object(text)
        diagnosis = told["diagnosis"]
        return cls(**{**told, "diagnosis": Diagnosis(**{**diagnosis, "cause": Failure(**diagnosis["cause"])})})


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The ranks are started again; ``number`` 0: it is not charged. ``halves_microbatch``: with half the microbatch."""

    number: int
    halves_microbatch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The run ends. ``reason`` is empty where the incident says it all; ``gives_up``: after it was started again."""

    reason: str = ""
    gives_up: bool = False

    def exit_code(self, code: int) -> int:
        return NO_PROGRESS if self.gives_up and code != HUNG else code


def after_failure(
    policy: RecoveryConfig, attempts: Sequence[FailedAttempt], *, max_requeues: int = 0
) -> Restart | Stop:
    """Decides about a run whose last attempt ended just now. Up to ``max_requeues`` that made room are not charged."""
    last, failed = attempts[-1], [each for each in attempts if each.kind not in ("preempted", "hosts")]
    if last.kind == "hosts":
        return Restart(number=0)
    if last.kind == "preempted":
        number = sum(each.kind == "preempted" for each in attempts)
        return Restart(number=number) if number <= max_requeues else Stop(reason=f"{_ENOUGH} {max_requeues}")
    reached, window = max(each.last_step for each in failed), policy.restart_window
    counted = [each for each in failed if window is None or reached - each.last_step < window]
    number = len(counted)
    if last.kind == "refused" or policy.max_restarts == 0:
        return Stop()
    if last.kind == "mistake":
        return Stop(reason="not started again: an error of this kind comes again")
    if last.kind == "out_of_memory" and policy.on_oom == "stop":
        return Stop(reason="not started again: memory would run out again (see recovery.on_oom)")
    if last.kind == "full_disk":
        return Stop(reason="not started again: it must be able to write first")
    if last.kind == "hang" and policy.on_hang == "stop":
        return Stop(reason="not started again: recovery.on_hang = stop")
    halves = last.kind == "out_of_memory" and policy.on_oom == "halve"
    is_same = len(failed) > 1 and replace(failed[-2], first_step=last.first_step) == last
    if is_same and not halves and not last.is_killed_early:
        return Stop(reason=f"not started again: the same came twice, after step {last.step}", gives_up=True)
    if last.kind == "error" and last.step == last.first_step == 0 and len(failed) == 1:
        return Stop(reason="not started again: it came before the first step, and would again")
    if number > policy.max_restarts:
        return Stop(reason=_spent(policy, counted), gives_up=True)
    best = max(attempt.last_step for attempt in failed)
    stalled = len(failed) - 1 - [attempt.last_step for attempt in failed].index(best)  # attempts since that one
    if stalled > policy.max_stalled_restarts:
        times = "the last restart" if stalled == 1 else f"each of the last {stalled} restarts"
        return Stop(reason=f"not started again: {times} came no further than step {best}", gives_up=True)
    if halves and not last.can_halve:
        return Stop(reason="not started again: the microbatch cannot be halved")
    return Restart(number=number, halves_microbatch=halves)


def _spent(policy: RecoveryConfig, counted: Sequence[FailedAttempt]) -> str:
    window = "" if policy.restart_window is None else f" within recovery.restart_window = {policy.restart_window} steps"
    lines = [f"    restart {number}: {each}" for number, each in enumerate(counted[:-1], start=1)]
    return "\n".join([f"not started again: recovery.max_restarts = {policy.max_restarts} is reached{window}", *lines])
