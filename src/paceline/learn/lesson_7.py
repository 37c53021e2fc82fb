"""Exercises of lesson 7: the bubble of a pipeline, what a rank holds, and 1F1B written by the reader.

The truth comes from the closed form of predictions (7.1), and from schedules that are walked through (7.2, 7.3).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from paceline.errors import UsageError
from paceline.learn.exercise import Exercise, Verdict, right, wrong
from paceline.learn.number_answers import Mistake, judge_number
from paceline.predict.formulas.step import StageSeconds, pipeline_seconds
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Action, Schedule, align, parse_action
from paceline.schedule.measure import ScheduleMeasure, measure_schedule
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


def _check_microbatches(answer: float) -> Verdict:
    truth = fewest_microbatches(_STAGES, _MOST_BUBBLE)
    mistakes = (
        Mistake(
            fewest_microbatches(_STAGES, _MOST_BUBBLE, idle_over="work"),
            "That is where idle time is 5 % of the work. The exercise asks for a share of the whole step, which is "
            "work and idle time together.",
        ),
        Mistake(
            fewest_microbatches(_STAGES + 1, _MOST_BUBBLE),
            "You counted one stage too many: a microbatch waits for the other stages, not for its own.",
        ),
        Mistake(truth + _STAGES - 1, "That is m + p - 1, all places of a row. The exercise asks for m alone."),
        Mistake(truth - 1, "Close: with one microbatch fewer than needed the bubble is just above 5 %."),
    )
    words = "1F1B with 8 stages needs that many: on one data rank, a batch of as many samples at least."
    return judge_number(answer, truth, mistakes, tolerance=0.0, praise=words)


# 7.2


def _check_in_flight(peak_in_flight: Callable[[str, int, int, int], Any]) -> Verdict:
    for schedule in ("gpipe", "1f1b"):
        for stages, microbatches in _SIZES:
            held = measure_schedule(make_schedule(schedule, ranks=stages, microbatches=microbatches)).in_flight
            given = [peak_in_flight(schedule, stages, microbatches, rank) for rank in range(stages)]
            if given != list(held):
                call = f"{schedule} with p = {stages}, m = {microbatches}: your ranks 0 to {stages - 1} hold {given}."
                return wrong(f"{call} {_about_held(schedule, stages, microbatches, given)}")
    return right("GPipe's memory grows with m, that of 1F1B ends at p: this is why large models train with 1F1B.")


def _about_held(schedule: str, stages: int, microbatches: int, given: Sequence[Any]) -> str:
    """Returns what is known about a wrong list of what the ranks hold."""
    if None in given:
        return "The function returns None: does every path end with return?"
    if schedule == "gpipe":
        return "Under GPipe no backward runs before the last forward. So how many forwards wait for theirs?"
    if given == [stages - rank for rank in range(stages)]:
        return f"There are only {microbatches} microbatches: a rank cannot hold more."
    if given == [min(microbatches, rank + 1) for rank in range(stages)]:
        return "The order is upside down: rank 0 waits longest for its first backward."
    if given == [min(microbatches, stages)] * stages:
        return "Only rank 0 holds that many: the last rank runs a backward right after its forward."
    if given == [min(microbatches, stages - 1 - rank) for rank in range(stages)]:
        return "So many forwards run before the rank begins to alternate. One more is in flight while it alternates."
    return "Count the ranks from this one to the last: a microbatch passes all of them before it comes back."


# 7.3


def _check_row(one_f_one_b_row: Callable[[int, int, int], Any]) -> Verdict:
    for stages, microbatches in _SIZES:
        rows = [one_f_one_b_row(stages, microbatches, rank) for rank in range(stages)]
        if problem := _problem_of_rows(rows, stages, microbatches):
            return wrong(f"p = {stages}, m = {microbatches}: {problem}")
    return right("Your rows run without a deadlock, take as long as ours, and hold no more.")


def _problem_of_rows(rows: Sequence[Any], stages: int, microbatches: int) -> str:
    """Returns what is wrong with the rows of all ranks; empty where nothing is."""
    try:
        schedule = _schedule_of(rows, stages, microbatches)
        check_schedule(schedule)
    except UsageError as error:
        return _without_name(error)
    ours = measure_schedule(make_schedule("1f1b", ranks=stages, microbatches=microbatches))
    return _compare(measure_schedule(schedule), ours)


def _without_name(error: UsageError) -> str:
    """Returns the words of an error of ``check_schedule``, whose actions have the rank too: B1.0 is B0 of rank 1."""
    words = str(error).removeprefix(f"schedule {_NAME!r}, ")
    return f"{words}\n  B1.0 is B0 in the row of rank 1" if re.search(r"[FB]\d+\.\d", words) else words


def _compare(theirs: ScheduleMeasure, ours: ScheduleMeasure) -> str:
    for rank, (held, most) in enumerate(zip(theirs.in_flight, ours.in_flight, strict=True)):
        if held > most:
            return (
                f"the rows run, but rank {rank} holds {held} microbatches where fewer would do. It runs too many "
                "forwards before its first backward; with all of them first it would be GPipe."
            )
    if theirs.makespan > ours.makespan + 1e-9:
        return (
            f"the rows run, but take {theirs.makespan:g} where {ours.makespan:g} would do (a forward takes 1, a "
            "backward 2). Some rank runs too few forwards first, and the ranks behind it wait."
        )
    return ""


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


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="7.1",
        title="How many microbatches",
        asks="A pipeline of 8 stages runs 1F1B. Give the smallest number of microbatches with which the bubble is at "
        "most 5 % of the step.",
        answer="number",
        hints=(
            "The bubble is (p - 1) / (m + p - 1), as a share of the whole step. Solve for m.",
            "p - 1 = 7. The 7 idle places are at most one twentieth of all m + 7 places.",
        ),
        check=_check_microbatches,
    ),
    Exercise(
        number="7.2",
        title="What a rank holds",
        asks="Write peak_in_flight(schedule, p, m, rank): the most microbatches that a rank holds at once, for the "
        'schedules "gpipe" and "1f1b". The first rank is 0. There may be fewer microbatches than stages.',
        answer="function",
        function="peak_in_flight",
        hints=(
            "Under GPipe no backward runs before the last forward.",
            "Under 1F1B a microbatch that leaves rank r comes back after it has passed the ranks behind r. Count the "
            "ranks from r to the end.",
            "A rank cannot hold more microbatches than there are.",
        ),
        check=_check_in_flight,
    ),
    Exercise(
        number="7.3",
        title="Write 1F1B",
        asks="Write one_f_one_b_row(p, m, rank): the list of what one rank does, in order, as texts: "
        '"F0" is the forward of microbatch 0, "B0" its backward. There may be fewer microbatches than stages.',
        answer="function",
        function="one_f_one_b_row",
        hints=(
            "A row has three parts: some forwards, then one forward and one backward in turn, then the backwards that "
            "are left.",
            "The last rank starts its first backward right after its first forward. How many forwards does the rank "
            "before it need first?",
            "Rank r runs min(m, p - 1 - r) forwards before it begins to alternate.",
        ),
        check=_check_row,
    ),
)
