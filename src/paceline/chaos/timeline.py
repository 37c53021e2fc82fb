"""What became of each fault: pure functions over notes, records and the commands that were run.

fault at t ---- the ranks stop ---- the next attempt begins ---- first new step at t'

work lost        steps that had been trained at t, less the step that the next attempt began with
time to recover  t' - t
how              went on (the same attempt), went back (it loaded a checkpoint itself), restarted (another attempt of
                 the same command), stopped (the command ended, and was run again as a scheduler would)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.chaos.faults import Fault
from paceline.chaos.notes import Fired
from paceline.monitor.records import EventRecord, Record, RunRecord, StepRecord

How = Literal["went on", "went back", "restarted", "stopped", "not recovered", "never happened"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One run of ``paceline train``: when, its exit code, and what it told."""

    start: float
    end: float
    code: int
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks, as a rank's records tell it. ``reason`` is what ended the one before."""

    start: float
    first_step: int
    reason: str
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What a config says about faults: keys of ``recovery``, and two of ``train``."""

    max_restarts: int = 3
    on_nan: str = "skip"
    on_spike: str = "ignore"
    spike_window: int = 50
    on_oom: str = "stop"
    on_hang: str = "restart"
    on_full_disk: str = "stop"
    max_bad_steps: int = 10
    has_automatic_microbatch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """What became of one fault."""

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
        """Whether it was handled as the policies say."""
        return self.how in self.expected


def read_attempts(records: Sequence[Record]) -> list[Attempt]:
    """Cuts the records of a rank into attempts."""
    cuts = [place for place, record in enumerate(records) if isinstance(record, RunRecord)]
    found = []
    for first, last in zip(cuts, [*cuts[1:], len(records)], strict=True):
        part = records[first:last]
        steps = tuple(each for each in part if isinstance(each, StepRecord))
        events = tuple(each for each in part if isinstance(each, EventRecord))
        began = next((each.step for each in events if each.name in ("resume", "restart")), 0)
        reason = next((str(each.detail.get("reason", "")) for each in events if each.name == "restart"), "")
        found.append(Attempt(start=part[0].time, first_step=began, reason=reason, steps=steps, events=events))
    return found


def final_steps(attempts: Sequence[Attempt]) -> dict[int, StepRecord]:
    """Returns the steps that the result is made of: of those that were done again, the last."""
    steps: dict[int, StepRecord] = {}
    for attempt in attempts:
        for record in attempt.steps:
            for later in [number for number in steps if number >= record.step]:
                del steps[later]
            steps[record.step] = record
    return steps


def expected_handling(fault: Fault, policies: Policies) -> tuple[How, ...]:
    """Says what the policies of a config make of a fault."""
    starts_again: tuple[How, ...] = ("restarted",) if policies.max_restarts else ("stopped",)
    kind = fault.kind
    if kind == "preempt":
        return ("stopped",)
    if kind == "slow":
        return ("went on",)
    if kind == "hang":
        return starts_again if policies.on_hang == "restart" else ("stopped",)
    if kind == "oom":
        rest: tuple[How, ...] = ("stopped",) if policies.on_oom == "stop" else starts_again
        return ("went on", *rest) if policies.has_automatic_microbatch else rest
    if kind in ("disk-full", "unwritable"):
        if policies.on_full_disk == "warn":
            return ("went on",)
        return ("stopped",) if kind == "disk-full" else starts_again
    if kind in ("nan", "spike"):
        return _expected_of_losses(fault, policies, starts_again)
    return starts_again


def _expected_of_losses(fault: Fault, policies: Policies, starts_again: tuple[How, ...]) -> tuple[How, ...]:
    if fault.kind == "nan":
        if policies.on_nan == "stop":
            return starts_again
        goes_back = policies.on_nan != "skip" and policies.max_bad_steps == 1
        return ("went back",) if goes_back else ("went on",)
    is_found = fault.step is not None and fault.step > policies.spike_window // 2  # it needs half a window
    if not is_found or policies.on_spike in ("ignore", "note"):
        return ("went on",)
    return starts_again if policies.on_spike == "stop" else ("went back",)


def handle(
    fault: Fault,
    fired: Sequence[Fired],
    attempts: Sequence[Attempt],
    commands: Sequence[Command],
    policies: Policies,
) -> Handling:
    """Finds out what became of a fault."""
    expected = expected_handling(fault, policies)
    own = [each for each in fired if each.number == fault.number]
    if not own:
        return Handling(fault=fault, how="never happened", expected=expected)
    at = own[0]
    before = max((place for place, each in enumerate(attempts) if each.start <= at.time), default=0)
    found = _first_new_step(attempts, before, at)
    if found is None:
        return Handling(
            fault=fault, how="not recovered", expected=expected, verdict=_told(commands, at.time), detail=at.detail
        )
    place, record, went_back = found
    how: How = "went back" if went_back is not None else "went on"
    began = went_back.step if went_back is not None else at.step - 1
    verdict = "" if went_back is None else str(went_back.detail.get("reason", ""))
    if place > before:
        is_same_command = any(each.start <= at.time and record.time <= each.end for each in commands)
        how, began = ("restarted" if is_same_command else "stopped"), attempts[place].first_step
        verdict = attempts[before + 1].reason if is_same_command else _told(commands, at.time)
        began = min(each.first_step for each in attempts[before + 1 : place + 1])
    done = _steps_done(at, fault)
    return Handling(
        fault=fault,
        how=how,
        expected=expected,
        lost_steps=max(0, done - began) if how != "went on" else 0,
        lost_samples=_samples_between(attempts, began, done) if how != "went on" else 0,
        recovery_s=max(0.0, record.time - at.time),
        verdict=verdict,
        detail=at.detail,
    )


def _steps_done(at: Fired, fault: Fault) -> int:
    """Returns how many steps had been trained: while saving or evaluating, the step itself too."""
    is_after = fault.phase in ("evaluation", "checkpoint") or fault.kind in (
        "disk-full",
        "unwritable",
        "kill-while-saving",
    )
    return at.step if is_after else at.step - 1


def _first_new_step(
    attempts: Sequence[Attempt], before: int, at: Fired
) -> tuple[int, StepRecord, EventRecord | None] | None:
    """Returns the first step after a fault that had not been trained before it, in which attempt, and a way back."""
    for place in range(before, len(attempts)):
        attempt = attempts[place]
        back = next((e for e in attempt.events if e.name == "roll_back" and e.time >= at.time), None)
        for record in attempt.steps:
            if record.time > at.time and record.step >= at.step and (back is None or record.time >= back.time):
                near = back is not None and place == before
                return place, record, back if near else None
    return None


def _samples_between(attempts: Sequence[Attempt], first: int, last: int) -> int:
    """Returns how many samples lie between the ends of two steps."""
    positions = {record.step: record.position for attempt in attempts for record in attempt.steps}
    return max(0, positions.get(last, 0) - positions.get(first, 0)) if last in positions else 0


def _told(commands: Sequence[Command], moment: float) -> str:
    """Returns what the command that ran at a moment said last about its end."""
    for command in commands:
        if command.start <= moment <= command.end:
            said = [line for line in command.told if line.startswith("paceline: ")]
            return said[-1].removeprefix("paceline: ") if said else f"exit code {command.code}"
    return ""
