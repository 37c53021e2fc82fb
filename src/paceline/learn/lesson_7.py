"""Checks of lesson 7: the bubble of a pipeline, what a rank holds, and 1F1B written by the reader.

The truth comes from the closed form of predictions (7.1), and from schedules that are walked through (7.2, 7.3).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from paceline.errors import UsageError
from paceline.learn.exercise import RIGHT, Said, judge_number, says
from paceline.predict.formulas.step import StageSeconds, pipeline_seconds
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Action, Schedule, align, parse_action
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import make_schedule

_STAGES, _MOST_BUBBLE = 8, 0.05
_NAME = "yours"
_SIZES = ((2, 4), (4, 8), (4, 3), (3, 7), (5, 2))  # stages and microbatches; two with fewer microbatches than stages


def fewest_microbatches(stages: int, most: float, *, idle_over: Literal["step", "work"] = "step") -> int:
    """Returns the fewest microbatches whose idle time under 1F1B is at most so much of the step, or of the work."""
    each = StageSeconds(1.0, 2.0)
    for microbatches in itertools.count(1):
        step = pipeline_seconds([each] * stages, microbatches)
        work = microbatches * each.both
        if (step - work) / (step if idle_over == "step" else work) <= most + 1e-9:
            return microbatches
    raise AssertionError  # the count has no end


def check_microbatches(answer: float) -> Said:
    truth = fewest_microbatches(_STAGES, _MOST_BUBBLE)
    mistakes = {
        "of_work": fewest_microbatches(_STAGES, _MOST_BUBBLE, idle_over="work"),
        "one_stage_more": fewest_microbatches(_STAGES + 1, _MOST_BUBBLE),
        "places": truth + _STAGES - 1,
        "one_less": truth - 1,
    }
    return judge_number(answer, truth, mistakes)


def check_in_flight(peak_in_flight: Callable[[str, int, int, int], Any]) -> Said:
    """Compares with what schedules hold that are walked through."""
    for schedule in ("gpipe", "1f1b"):
        for stages, microbatches in _SIZES:
            held = measure_schedule(make_schedule(schedule, ranks=stages, microbatches=microbatches)).in_flight
            given = [peak_in_flight(schedule, stages, microbatches, rank) for rank in range(stages)]
            if given != list(held):
                call = f"{schedule} with p = {stages}, m = {microbatches}: your ranks 0 to {stages - 1} hold {given}."
                return says(
                    _slip_in_flight(schedule, stages, microbatches, given), call=call, microbatches=microbatches
                )
    return RIGHT


def _slip_in_flight(schedule: str, stages: int, microbatches: int, given: Sequence[Any]) -> str:
    """Returns the name of what is known about a wrong list of what the ranks hold."""
    if None in given:
        return "none"
    if schedule == "gpipe":
        return "gpipe"
    usual = {
        "too_many": [stages - rank for rank in range(stages)],
        "upside_down": [min(microbatches, rank + 1) for rank in range(stages)],
        "same": [min(microbatches, stages)] * stages,
        "one_less": [min(microbatches, stages - 1 - rank) for rank in range(stages)],
    }
    return next((name for name, held in usual.items() if given == held), "otherwise")


def check_row(one_f_one_b_row: Callable[[int, int, int], Any]) -> Said:
    """Runs the reader's rows: do they run, hold no more than ours, and take no longer?"""
    for stages, microbatches in _SIZES:
        rows = [one_f_one_b_row(stages, microbatches, rank) for rank in range(stages)]
        if said := _rows_wrong(rows, stages, microbatches):
            return says(said.name, stages=stages, microbatches=microbatches, **said.gaps)
    return RIGHT


def _rows_wrong(rows: Sequence[Any], stages: int, microbatches: int) -> Said | None:
    """Says what is wrong with the rows of all ranks; None where nothing is."""
    try:
        schedule = _schedule_of(rows, stages, microbatches)
        check_schedule(schedule)
    except UsageError as error:
        # Actions of check_schedule have the rank too: B1.0 is B0 of rank 1.
        words = str(error).removeprefix(f"schedule {_NAME!r}, ")
        more = "\n  B1.0 is B0 in the row of rank 1" if re.search(r"[FB]\d+\.\d", words) else ""
        return says("broken", problem=words + more)
    theirs = measure_schedule(schedule)
    ours = measure_schedule(make_schedule("1f1b", ranks=stages, microbatches=microbatches))
    for rank, (held, most) in enumerate(zip(theirs.in_flight, ours.in_flight, strict=True)):
        if held > most:
            return says("memory", rank=rank, held=held)
    if theirs.makespan > ours.makespan + 1e-9:
        return says("slow", took=theirs.makespan, best=ours.makespan)
    return None


def _schedule_of(rows: Sequence[Any], stages: int, microbatches: int) -> Schedule:
    """Makes a schedule of the reader's rows; stuck ones stand side by side, so that the check finds the circle.

    Raises UsageError for a row that is no list of texts such as "F0".
    """
    orders = [[_action(text, rank) for text in _texts(row, rank)] for rank, row in enumerate(rows)]
    try:
        return align(_NAME, orders, range(stages), microbatches)
    except KeyError:  # an action that never runs has no time
        return Schedule(
            name=_NAME, rows=tuple(map(tuple, orders)), placement=tuple(range(stages)), microbatches=microbatches
        )


def _texts(row: Any, rank: int) -> Sequence[str]:
    if isinstance(row, list | tuple) and all(isinstance(each, str) for each in row):
        return row
    raise UsageError(f"the row of rank {rank} is {str(row)[:60]!r}\n  a row is a list of texts\n  such as ['F0', 'B0']")


def _action(text: str, rank: int) -> Action:
    kind, number = text[:1], text[1:]
    if kind not in ("F", "B") or not number.isdigit():
        raise UsageError(
            f"rank {rank} has {text[:20]!r}\n  an action is F or B with the number of a microbatch\n  such as 'F0'"
        )
    return parse_action(f"{kind}{rank}.{number}")


CHECKS = {"7.1": check_microbatches, "7.2": check_in_flight, "7.3": check_row}
