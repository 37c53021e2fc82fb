"""Kept figures of schedules: every cell, program, time, text and picture of each kind."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kept_figures import assert_kept, told

from paceline.schedule.check import check_schedule
from paceline.schedule.clock import RankClock, StreamClock, Timeline, time_in_all
from paceline.schedule.grid import Action, Schedule, lower, parse_action
from paceline.schedule.measure import ScheduleCosts, ScheduleMeasure, StageCost, equal_costs, measure_schedule
from paceline.schedule.schedules import SCHEDULE_NAMES, make_schedule
from paceline.schedule.text import draw, format_csv, parse_csv, read_csv, render_text

CASES: list[tuple[str, int, int, int | None]] = [
    (name, ranks, microbatches, None)
    for name in SCHEDULE_NAMES
    for ranks, microbatches in ((1, 1), (1, 3), (2, 1), (3, 1), (2, 2), (2, 5), (3, 4), (4, 9), (4, 3))
]
CASES += [("interleaved", 2, 4, 3), ("interleaved", 3, 7, 2), ("interleaved", 4, 8, 4)]
OWN = """# schedule=mine placement=0,1 microbatches=2
F0.0,SF0.0,F0.1,SF0.1,RB0.0,B0.0,RB0.1,B0.1,R0
RF1.0,F1.0,B1.0,SB1.0,RF1.1,F1.1,B1.1,SB1.1
"""


def figures() -> dict[str, object]:
    parts = (_of_schedules(), _of_texts(), _of_clocks())
    return {name: value for part in parts for name, value in part}


def test_schedules_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _measured(measure: ScheduleMeasure) -> object:
    times = {str(action): list(span) for action, span in measure.times.items()}
    return [replace(measure, times={}), times if len(times) < 40 else list(times.values())[::7]]


def _costs(schedule: Schedule) -> ScheduleCosts:
    stages = tuple(
        StageCost(forward=1.0 + stage / 4, backward_input=1.5 + (stage % 2), backward_weight=0.75)
        for stage in range(schedule.stages)
    )
    return ScheduleCosts(stages=stages, communication=0.3)


def _of_schedules() -> Iterator[tuple[str, object]]:
    for name, ranks, microbatches, chunks in CASES:
        made = told(lambda name=name, p=ranks, m=microbatches, c=chunks: make_schedule(name, p, m, c))
        key = f"{name} {ranks} {microbatches} {chunks}"
        if not isinstance(made, Schedule):
            yield key, made
            continue
        check_schedule(made)
        programs = [" ".join(map(str, program)) for program in lower(made)]
        uneven = measure_schedule(made, _costs(made))
        yield key, [format_csv(made), programs, _measured(measure_schedule(made)), _measured(uneven)]
        with_messages = replace(made, rows=tuple(lower(made)))
        yield (
            f"{key} sent",
            [
                told(lambda made=with_messages: check_schedule(made)),
                [" ".join(map(str, program)) for program in lower(with_messages)] == programs,
                [made.splits_backward, made.has_messages, with_messages.has_messages, made.stages, made.ranks],
            ],
        )
    for arguments in (("1f1b", 0, 1), ("1f1b", 1, 0), ("zb-v", 2, 4, 3), ("interleaved", 2, 4, 1), ("zbh", 1, 1)):
        yield f"refused {arguments}", told(lambda arguments=arguments: make_schedule(*arguments))
    two = make_schedule("1f1b", 2, 2)
    wrong = [
        StageCost(forward=0.0, backward_input=1.0, backward_weight=1.0),
        StageCost(forward=1.0, backward_input=-1.0, backward_weight=0.0),
    ]
    wrong.append(StageCost(forward=1.0, backward_input=0.0, backward_weight=0.0))
    for stages in ([wrong[0]] * 2, [wrong[1]] * 2, [wrong[2]] * 2, [wrong[2]]):
        costs = ScheduleCosts(stages=tuple(stages))
        found = told(lambda costs=costs: _measured(measure_schedule(two, costs)))
        yield f"costs {len(stages)} {stages[0].forward} {stages[0].backward_input}", found
    yield "equal", equal_costs(make_schedule("interleaved", 2, 2, 3)).stages


def _of_texts() -> Iterator[tuple[str, object]]:
    for name, ranks, microbatches, chunks in CASES[::3]:
        made: Any = told(lambda name=name, p=ranks, m=microbatches, c=chunks: make_schedule(name, p, m, c))
        if not isinstance(made, Schedule):
            continue
        for width in (40, 120):
            yield f"text {name} {ranks} {microbatches} {width}", render_text(made, width=width)
        yield f"uneven {name} {ranks} {microbatches}", render_text(made, measure_schedule(made, _costs(made)))
        again = parse_csv(format_csv(made))
        bare = parse_csv("\n".join(format_csv(made).splitlines()[1:]), source="bare.csv")
        yield f"read {name} {ranks} {microbatches}", [again == made, bare.placement, bare.microbatches, bare.name]
    own = parse_csv(OWN)
    yield "own", [told(lambda: check_schedule(own)), [" ".join(map(str, each)) for each in lower(own)], format_csv(own)]
    texts = ["", "# odd=1\nF0.0", "F0.0,X", "# placement=a\nF0.0,B0.0", "F0.0,B0.0\n\nF2.0", "# microbatches=x\nF0.0"]
    texts += ["F1.0,B1.0", "F0.0,R0.1", "F0.0,R0,", "F0.0 , ,B0.0,\n\n"]
    yield "texts", {text: told(lambda text=text: str(parse_csv(text).rows)) for text in texts}
    yield (
        "actions",
        {text: told(lambda text=text: parse_action(text)) for text in ("F0.3", "R1", "R1.0", "F1", "SB2.10")},
    )
    yield "compute", {kind: Action(kind, 0, 0).is_compute for kind in ("F", "B", "I", "W", "SF", "R")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(OWN, encoding="utf-8")
        yield "file", read_csv(path).placement
        draw(make_schedule("1f1b", 2, 2), Path(folder, "a.svg"))
        yield "picture", Path(folder, "a.svg").stat().st_size > 1000
        odd = str(told(lambda: draw(make_schedule("1f1b", 2, 2), Path(folder, "a.odd"))))
        yield (
            "no picture",
            re.sub(r"(?<=its format: ).*", "FORMATS", odd.replace(folder, "FOLDER")),
        )  # matplotlib's list
    for name, ranks, microbatches in (("zb-v", 2, 4), ("1f1b", 3, 4), ("interleaved", 2, 188)):
        pictures: list[Any] = []
        with patch("paceline.schedule.text.save_picture", lambda figure, _, kept=pictures: kept.append(figure)):
            draw(make_schedule(name, ranks, microbatches), Path("any.svg"))
        yield f"picture {name}", _picture(pictures[0])


def _picture(figure: Any) -> object:
    """What is drawn, whatever version draws it: bars, their labels, axes and words."""
    (axes,) = figure.axes
    bars = [
        [*each.get_xy(), each.get_width(), each.get_height(), *each.get_facecolor()[:3]] for each in axes.patches[::5]
    ]
    labels = [[*each.get_position(), each.get_text(), each.get_fontsize()] for each in axes.texts[::3]]
    words = [axes.get_title(loc="left"), axes.get_xlabel(), [each.get_text() for each in axes.get_yticklabels()]]
    sides = [axes.spines[side].get_visible() for side in ("top", "right", "left")]
    return [
        bars[:12],
        labels[:12],
        len(axes.patches),
        len(axes.texts),
        words,
        sides,
        axes.get_xlim(),
        axes.get_ylim(),
        list(figure.get_size_inches()),
    ]


def _of_clocks() -> Iterator[tuple[str, object]]:
    clock = StreamClock()
    found = [
        clock.end,
        clock.run("a", 2.0),
        clock.run("b", 1.0, (1.5, 0.5)),
        clock.run("a", 1.0, (1.0,)),
        clock.free("c"),
    ]
    clock.occupy("b", 1.0)
    clock.occupy("c", 7.0)
    yield "streams", [*found, clock.free("b"), clock.free("c"), clock.end]
    timeline = Timeline()
    first = timeline.add("compute", 2.0)
    timeline.add("link", 3.0, after=(first,))
    timeline.add("compute", 1.0)
    yield "timeline", [timeline.busy("compute"), timeline.idle("compute"), timeline.idle("link"), timeline.busy("none")]
    rank = RankClock()
    rank.compute_for(1.0)
    moments = [rank.now, rank.issue("lane", 2.0), rank.now]
    rank.work_on_host(0.5, (1.25,))
    moments += [rank.host, rank.now]
    rank.wait(2.5)
    rank.work_on_host(0.25)
    yield "rank", [*moments, rank.compute, rank.host, rank.issue("lane", 1.0)]
    intervals = [[(0.0, 2.0), (1.0, 4.0), (6.0, 7.0)], [(1.5, 3.0), (3.0, 6.5)]]
    ways = [time_in_all(*intervals), time_in_all(intervals[0]), time_in_all(), time_in_all(*intervals, [(2.0, 2.0)])]
    yield "in all", [*ways, time_in_all([(0.0, 1.0), (1.0, 2.0)], [(0.5, 1.5)])]
