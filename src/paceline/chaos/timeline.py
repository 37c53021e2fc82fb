"""What became of each fault: pure functions over notes, records and the commands that were run.

fault at t ---- the ranks stop ---- the next attempt begins ---- first new step at t'

work lost        steps that had been trained at t, less the step that the next attempt began with
time to recover  t' - t
how              went on (the same attempt), went back (it loaded a checkpoint itself), restarted (another attempt of
                 the same command), stopped (the command ended, and was run again as a scheduler would)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.chaos.faults import ON_LOSS, SLOW, WHILE_SAVING, Fault, Fired, Passed, Started
from paceline.config import Config
from paceline.health.straggler import find_straggler
from paceline.records.summary import RankAttempt, RunRecords, StepTable

How = Literal["went on", "went back", "restarted", "stopped", "not recovered", "never happened"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One run of ``paceline train``: when, its exit code, and what it told at which time."""

    start: float
    end: float
    code: int
    told: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the ranks noted, each in the order of time."""

    fired: tuple[Fired, ...]
    started: tuple[Started, ...]
    passed: tuple[Passed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    fault: Fault
    how: How
    expected: tuple[How, ...]
    lost_steps: int = 0
    lost_samples: int = 0
    recovery_s: float | None = None
    verdict: str = ""
    detail: str = ""

    @property
    def is_right(self) -> bool:
        return self.how in self.expected


def expected_handling(fault: Fault, config: Config) -> tuple[How, ...]:
    """Says what the policies of a config make of a fault."""
    kind, policies = fault.kind, config.recovery
    starts_again: tuple[How, ...] = ("restarted",) if policies.max_restarts else ("stopped",)
    if kind == "preempt":
        return ("stopped",)
    if kind in SLOW:
        return ("went on",)
    if kind in ("hang", "stop"):
        return starts_again if policies.on_hang == "restart" else ("stopped",)
    if kind == "oom":
        rest: tuple[How, ...] = ("stopped",) if policies.on_oom == "stop" else starts_again
        return ("went on", *rest) if config.train.microbatch == "auto" else rest
    if kind in ("disk-full", "unwritable"):
        return ("went on",) if policies.on_full_disk == "warn" else ("stopped",)
    if kind == "nan" and policies.on_nan != "stop":
        goes_back = policies.on_nan != "skip" and config.train.max_bad_steps == 1
        return ("went back",) if goes_back else ("went on",)
    if kind == "spike":
        is_found = fault.step is not None and fault.step > policies.spike_window // 2  # it needs half a window
        if not is_found or policies.on_spike in ("ignore", "note"):
            return ("went on",)
        return starts_again if policies.on_spike == "stop" else ("went back",)
    return starts_again


def handle(
    fault: Fault, notes: Notes, attempts: Sequence[RankAttempt], commands: Sequence[Command], config: Config
) -> Handling:
    """Finds out what became of a fault. ``attempts`` are rank 0's."""
    found = Handling(fault=fault, how="never happened", expected=expected_handling(fault, config))
    at = next((each for each in notes.fired if each.number == fault.number), None)
    if at is None:
        return found
    found = replace(found, detail=at.detail)
    passed = _passed(fault, notes.passed, found.expected)
    is_done = bool(commands) and commands[-1].code == 0
    later = next((each for each in notes.started if each.time > at.time and each.step >= at.step), None)
    if passed is None and is_done and later is not None:  # nothing was left to train
        passed = Passed(number=fault.number, step=later.step, is_later=True, time=later.time)
    if passed is None and not (is_done and not any(each.time > at.time for each in notes.started)):
        return replace(found, how="not recovered", verdict=_verdict(commands, at.time))
    if passed is None:  # in the last step, and the run came to its end all the same
        return _handled_inside(replace(found, recovery_s=0.0), at, attempts)
    found = replace(found, recovery_s=max(0.0, passed.time - at.time))
    began = next((each for each in notes.started if at.time < each.time <= passed.time), None)
    if began is None:
        return _handled_inside(found, at, attempts)
    # While saving or evaluating, the step itself has been trained too.
    is_after = fault.phase in ("evaluation", "checkpoint") or fault.kind in WHILE_SAVING
    is_same_command = any(each.start <= at.time and passed.time <= each.end for each in commands)
    return replace(
        found,
        how="restarted" if is_same_command else "stopped",
        lost_steps=max(0, at.step - (not is_after) - began.step),
        lost_samples=max(0, at.position - began.position),
        verdict=_verdict(commands, at.time),
    )


def _passed(fault: Fault, noted: Sequence[Passed], expected: tuple[How, ...]) -> Passed | None:
    """Returns where the run was past a fault.

    A signal and a bad loss are obeyed a step or two later: where they are to end the attempt, a later one counts.
    """
    own = [each for each in noted if each.number == fault.number]
    later = [each for each in own if each.is_later]
    if later and (fault.kind == "preempt" or fault.kind in ON_LOSS) and expected in (("restarted",), ("stopped",)):
        return later[0]
    return own[0] if own else None


def _handled_inside(found: Handling, at: Fired, attempts: Sequence[RankAttempt]) -> Handling:
    """Tells of a fault after which the same attempt went on, or went back to a checkpoint by itself."""
    events = [each for attempt in attempts for each in attempt.events]
    back = next((each for each in events if each.name == "roll_back" and each.time >= at.time), None)
    last = max((record.time for attempt in attempts for record in attempt.steps), default=at.time)
    if found.fault.kind == "preempt" and last - at.time < 1.0:
        found = replace(found, expected=(*found.expected, "went on"))  # ranks ask one another some times a second
    if back is None or found.fault.kind not in ON_LOSS:
        return replace(found, how="went on")
    return replace(
        found,
        how="went back",
        lost_steps=int(back.detail.get("from_step", back.step)) - back.step,
        lost_samples=int(back.detail.get("skipped_samples", 0)),
        verdict=str(back.detail.get("reason", "")),
    )


def straggler_verdict(handling: Handling, by_rank: Sequence[Sequence[RankAttempt]]) -> str:
    """Says which rank was the slow one in the steps of a slow rank, as every run's report does; empty if none was."""
    first = handling.fault.step or 0
    there = {rank: own for rank, own in enumerate(by_rank) if own}
    steps = RunRecords(there).steps.only(range(first, first + handling.fault.length)) if there else StepTable([])
    found = find_straggler(steps.rows)
    return "" if found is None else str(found)


def _verdict(commands: Sequence[Command], moment: float) -> str:
    """Returns what was told first after a moment, by the command that ran then, and what was to be done."""
    said = [
        text.removeprefix("paceline: ")
        for command in commands
        for when, text in command.told
        if command.start <= moment <= command.end and when >= moment and text.startswith("paceline: ")
    ]
    return next((text.partition("; restarting ")[0] for text in said if not text.startswith("passed over")), "")
