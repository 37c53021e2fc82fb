"""Checks of answers that need no ranks, and no torch: a block's time, schedules, rounding, and places."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

from paceline.cluster.devices import load_cluster
from paceline.config.sections import GPT_SIZES
from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.block import BlockModel
from paceline.predict.formulas.constants import constants_for, fitted_constants
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Schedule, align, parse_action
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import make_schedule
from paceline_course.exercise import RIGHT, MistakeError, Said, says

# Lesson 6: how many ranks may share a block.

_DEGREES = (1, 2, 4, 8)


@cache
def block_seconds(cluster_name: str, size: str, tensor: int, tokens: int) -> tuple[float, float]:
    """Returns what one block computes and waits in a step, in seconds: one of ``tensor`` ranks, one sequence."""
    cluster = load_cluster(cluster_name)
    workload = Workload(
        model=replace(GPT_SIZES[size], vocab_size=32000),
        layout=Layout(tensor=tensor).for_ranks(tensor),
        run=Running(seq_len=tokens, compute="bf16"),
    )
    constants, _ = constants_for(fitted_constants(), cluster.device.generation, "eager")
    costs = BlockModel(workload, cluster, constants).costs()
    both = costs.forward + costs.backward
    return both.device, both.wait


def check_degree(answer: float) -> Said:
    """Compares with what the formulas say of each number of ranks."""
    if answer not in _DEGREES:
        return says("unknown", answer=answer, known=", ".join(map(str, _DEGREES)))
    times = {each: block_seconds("1x dgx-a100", "gpt-1.1b", each, 512) for each in _DEGREES}
    paying = [each for each, (device, wait) in times.items() if wait < device]
    degree = int(answer)
    device, wait = times[degree]
    name = "too_many" if degree not in paying else "right" if degree == paying[-1] else "too_few"
    return says(name, degree=degree, device=device * 1e3, wait=wait * 1e3)


# Lesson 7: 1F1B.

_NAME = "yours"
_SIZES = ((2, 4), (4, 8), (4, 3), (3, 7), (5, 2))  # stages and microbatches; two with fewer microbatches than stages


def check_row(one_f_one_b_row: Callable[[int, int, int], Any]) -> Said:
    """Runs the reader's rows: do they run, hold no more than ours, and take no longer?"""
    for stages, microbatches in _SIZES:
        rows = [one_f_one_b_row(stages, microbatches, rank) for rank in range(stages)]
        if said := _rows_wrong(rows, stages, microbatches):
            return says(said.name, stages=stages, microbatches=microbatches, **said.gaps)
    return RIGHT


def _rows_wrong(rows: Sequence[Any], stages: int, microbatches: int) -> Said | None:
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
    """Makes a schedule of the reader's rows, stuck ones too. Raises UsageError for a row that is no list of texts."""
    orders = []
    for rank, row in enumerate(rows):
        if not isinstance(row, list | tuple) or not all(isinstance(each, str) for each in row):
            shown = repr(str(row)[:60])
            raise UsageError(f"the row of rank {rank} is {shown}\n  a row is a list of texts\n  such as ['F0', 'B0']")
        for text in row:
            if text[:1] not in ("F", "B") or not text[1:].isdigit():
                rule = "an action is F or B with the number of a microbatch"
                raise UsageError(f"rank {rank} has {text[:20]!r}\n  {rule}\n  such as 'F0'")
        orders.append([parse_action(f"{text[:1]}{rank}.{text[1:]}") for text in row])
    try:
        return align(_NAME, orders, range(stages), microbatches)
    except KeyError:  # an action that never runs has no time
        placed = tuple(range(stages))
        return Schedule(name=_NAME, rows=tuple(map(tuple, orders)), placement=placed, microbatches=microbatches)


# Lesson 8: rounding.

_WEIGHTS = (1.0, 1.9921875, 0.0546875, 3.0, 300.0, 0.0078125)  # all of them are bf16 numbers
_PARTS = (0.05, 0.1, 0.3, 0.45, 0.55, 0.8, 1.3)  # updates, in distances to the next number


def _distance(weight: float, significant_bits: int = 8) -> float:
    return 2.0 ** (math.floor(math.log2(weight)) - significant_bits + 1)


def _rounded(number: float) -> float:
    distance = _distance(number)
    return round(number / distance) * distance  # a half goes to the even one, as in hardware


_CASES = tuple((weight, part * _distance(weight)) for weight in _WEIGHTS for part in _PARTS)


# What usual mistakes answer.
_MOVE_SLIPS: tuple[tuple[Callable[[float, float], bool], str], ...] = (
    (lambda w, u: u >= _distance(w), "whole_distance"),
    (lambda _, u: u > _distance(1.0) / 2, "same_for_all"),
    (lambda w, u: u > w / 256, "share"),
    (lambda w, u: u > w / 128, "share"),
    (lambda w, u: u > _distance(w, 9) / 2, "nine_bits"),
    (lambda w, u: u > _distance(w, 11) / 2, "fp16"),
    (lambda w, u: w + u != w, "float64"),
)


def _without_torch(call: Callable[[], Any]) -> Any:
    """Calls the reader's function. Raises MistakeError where it calls torch."""
    called: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        name = getattr(arg, "__module__", "") or type(getattr(arg, "__self__", None)).__module__
        module = str(name if event == "c_call" else frame.f_globals.get("__name__", ""))
        if event in ("call", "c_call") and module.partition(".")[0] == "torch":
            called.append(module)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        found = call()
    finally:
        sys.setprofile(before)
    if called:
        raise MistakeError("Your function calls torch: compute the rounding yourself, with Python's own numbers.")
    return found


def check_moves(moves: Callable[[float, float], Any]) -> Said:
    """Compares with bf16, whose numbers are ``_distance`` apart, and with what usual mistakes answer."""
    given = _without_torch(lambda: [moves(weight, update) for weight, update in _CASES])
    if odd := [each for each in given if each not in (True, False)]:
        return says("no_bool", given=odd[0])
    expected = [_rounded(weight + update) != weight for weight, update in _CASES]
    if given == expected:
        return RIGHT
    for mistake, name in _MOVE_SLIPS:
        if given == [mistake(*case) for case in _CASES]:
            return says(name)
    index = next(place for place, each in enumerate(given) if each != expected[place])
    (weight, update), said = _CASES[index], given[index]
    return says("otherwise", weight=weight, update=update, given=said, expected=not said)


# Lesson 12: the places that ranks read.

_STEPS = ((0, 8, 4), (24, 8, 3), (40, 5, 8), (1000, 6, 1), (7, 9, 2))  # position, batch, ranks


def check_places(next_places: Callable[[int, int, int, int], Any]) -> Said:
    """Says whether the ranks of a step read each of its places once, and about as many each."""
    for position, batch, ranks in _STEPS:
        read = [next_places(position, batch, rank, ranks) for rank in range(ranks)]
        for rank, places in enumerate(read):
            if not isinstance(places, list | tuple | range) or not all(type(each) is int for each in places):
                return says("no_list", call=f"{position}, {batch}, {rank}, {ranks}", given=str(places)[:60])
        wanted, found = range(position, position + batch), Counter(place for places in read for place in places)
        wrong = {
            "outside": [place for place in found if place not in wanted],
            "twice": [place for place in found if found[place] > 1],
            "left_out": [place for place in wanted if place not in found],
        }
        for name, places in wrong.items():
            if places:
                return says(name, ranks=ranks, batch=batch, position=position, place=min(places))
        counts = list(map(len, read))
        if max(counts) > min(counts) + 1:
            return says("uneven", ranks=ranks, batch=batch, most=max(counts), least=min(counts))
    return RIGHT


CHECKS = {"6.3": check_degree, "7.3": check_row, "8.2": check_moves, "12.3": check_places}
