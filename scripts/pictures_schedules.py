"""Picture of lesson 7: every pipeline schedule on one time scale, from ``paceline.schedule``."""

from __future__ import annotations

from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Schedule
from paceline.schedule.measure import ScheduleMeasure, measure_schedule
from paceline.schedule.schedules import SCHEDULE_NAMES, make_schedule
from pictures_svg import MARGIN, WIDTH, Picture

STAGES, MICROBATCHES = 4, 8
_KINDS = {"F": "a", "B": "b", "I": "b", "W": "h"}
_LEFT = MARGIN + 52
_ROW = 19


def draw_schedules() -> str:
    """Draws schedules.svg."""
    picture = Picture(
        f"Five pipeline schedules: {STAGES} ranks, {MICROBATCHES} microbatches, one time scale",
        "A row is a rank, a box is the work on one microbatch, with its number. A backward takes twice as long as a "
        "forward. What is not coloured is the bubble: the rank waits. A schedule that ends further left is faster.",
        "paceline.schedule",
    )
    y = picture.legend(
        MARGIN,
        picture.top + 8,
        [
            ("a", "forward"),
            ("b", "backward, or its part to the input"),
            ("h", "part of backward to the weights"),
            ("none", "bubble"),
        ],
    )
    y = picture.legend(MARGIN, y, [("a thin", "paler: the rank's second chunk of layers (interleaved, zb-v)")])
    found = [_measured(name) for name in SCHEDULE_NAMES]
    longest = max(measure.makespan for _, measure in found)
    scale = (WIDTH - MARGIN - _LEFT) / longest
    for schedule, measure in found:
        y = _draw_one(picture, y + 4, schedule, measure, scale)
    picture.ruler(_LEFT, y + 6, longest * scale, longest, "t_f", marks=10)
    picture.text(_LEFT, y + 42, "t_f: the time of one forward of a rank's share of the model", "small soft")
    return picture.svg(y + 56)


def _measured(name: str) -> tuple[Schedule, ScheduleMeasure]:
    schedule = make_schedule(name, STAGES, MICROBATCHES)
    check_schedule(schedule)
    return schedule, measure_schedule(schedule)


def _draw_one(picture: Picture, y: float, schedule: Schedule, measure: ScheduleMeasure, scale: float) -> float:
    held = max(measure.in_flight_share)
    picture.text(MARGIN, y + 12, schedule.name, "name ink")
    words = f"bubble {measure.bubble:.0%} of the step; a rank keeps at most {held:g} microbatches"
    picture.text(WIDTH - MARGIN, y + 12, words, "small soft end")
    top = y + 20
    width = measure.makespan * scale
    for rank in range(schedule.ranks):
        picture.text(MARGIN, top + _ROW * rank + 13, f"rank {rank}", "tiny soft")
        picture.box(_LEFT, top + _ROW * rank, width, _ROW - 2, "none")
    for is_second in (False, True):
        for kind, colour in _KINDS.items():
            _draw_kind(picture, top, schedule, measure, scale, kind, colour, is_second=is_second)
    return top + _ROW * schedule.ranks + 12


def _draw_kind(
    picture: Picture,
    top: float,
    schedule: Schedule,
    measure: ScheduleMeasure,
    scale: float,
    kind: str,
    colour: str,
    *,
    is_second: bool,
) -> None:
    """Draws all boxes of one kind in one element, and their numbers in another."""
    boxes, digits, letters = [], [], ""
    for action, (start, end) in measure.times.items():
        if action.kind != kind or (action.stage >= schedule.ranks) != is_second:
            continue
        y = top + _ROW * schedule.placement[action.stage]
        boxes.append((_LEFT + start * scale, y, (end - start) * scale - 0.6, _ROW - 2))
        digits.append((_LEFT + (start + end) / 2 * scale - 0.3, y + 13))
        letters += str(action.microbatch)
    if is_second:
        picture.boxes(boxes, "page")
    picture.boxes(boxes, f"{colour} thin" if is_second else colour)
    picture.digits(digits, letters, "tiny mid " + ("ink" if is_second else "on"))
