"""``paceline schedule``: who does what when in a pipeline, before anything is started."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.options import print_json, write_output
from paceline.errors import UsageError
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.schedule.grid import Schedule
    from paceline.schedule.measure import ScheduleCosts

_MOST_ACTIONS = 200_000  # of a grid that still can be looked at; a larger one takes minutes


def schedule(
    name: str = typer.Argument(metavar="NAME|FILE.csv", help="gpipe, 1f1b, interleaved, zb-h1, zb-v, or your own."),
    *,
    stages: int | None = typer.Option(None, "--stages", "-s", min=1, help="Ranks, each --chunks stages.  [default: 4]"),
    microbatches: int | None = typer.Option(None, "--microbatches", "-m", min=1, help="Microbatches.  [default: 8]"),
    chunks: int | None = typer.Option(None, min=1, help="Stages a rank.  [default: 2 for interleaved, zb-v; else 1]"),
    costs: str | None = typer.Option(None, metavar="C,C,...", help="What stages take; see above.  [default: equal]"),
    communication: float = typer.Option(0.0, "--communication", min=0.0, help="What a message takes, in that unit."),
    messages: bool = typer.Option(False, "--messages", help="Show sends, receives and reduces; --csv has them too."),
    csv: str | None = typer.Option(None, "--csv", metavar="FILE|-", help="Write the grid as CSV; - prints it alone."),
    png: Path | None = typer.Option(None, "--png", metavar="FILE", help="Draw the grid; .svg and .pdf go too."),
    as_json: bool = typer.Option(False, "--json", help="Print the grid and its measures as JSON."),
) -> None:
    """Show a pipeline schedule: its grid, its bubble, its memory."""
    from paceline.schedule.check import check_schedule
    from paceline.schedule.grid import lower
    from paceline.schedule.measure import measure_schedule
    from paceline.schedule.text import draw, render_text

    found = _find(name, stages, microbatches, chunks)
    check_schedule(found)
    measure = measure_schedule(found, _read_costs(costs, communication, found))
    if csv is not None:
        _write_csv(found, csv, with_messages=messages)
    if png is not None:
        draw(found, png, measure)
    if as_json:
        measured = ("makespan", "bubble", "overhead", "busy", "in_flight", "in_flight_share")
        print_json(
            {key: getattr(found, key) for key in ("name", "ranks", "stages", "microbatches", "placement")}
            | {key: getattr(measure, key) for key in measured}
            | {"rows": [[str(action) if action else None for action in row] for row in found.rows]}
            | {"programs": [[str(action) for action in program] for program in lower(found)]}
        )
    elif csv != "-":
        echo(render_text(found, measure, width=max(60, shutil.get_terminal_size((120, 40)).columns)))
        for rank, program in enumerate(lower(found)) if messages else ():
            echo(f"\nrank {rank} runs  {' '.join(map(str, program))}")


def _find(name: str, ranks: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    from paceline.schedule.schedules import SCHEDULE_NAMES, make_schedule
    from paceline.schedule.text import read_csv

    if name in SCHEDULE_NAMES or not (name.endswith(".csv") or Path(name).exists()):
        ranks, microbatches = ranks or 4, microbatches or 8
        if 3 * ranks * microbatches * (chunks or 1) > _MOST_ACTIONS:
            raise UsageError(
                f"{ranks} stages and {microbatches} microbatches with {chunks or 1} chunks make a very large grid\n"
                f"  at most {_MOST_ACTIONS} actions are shown\n  show a smaller one with the same ratio"
            )
        return make_schedule(name, ranks, microbatches, chunks)
    asked = {"--stages": ranks, "--microbatches": microbatches, "--chunks": chunks}
    if given := [option for option, value in asked.items() if value]:
        raise UsageError(f"{', '.join(given)} beside {name}\n  the file says it\n  leave {given[0]} out")
    return read_csv(Path(name))


def _read_costs(text: str | None, communication: float, found: Schedule) -> ScheduleCosts | None:
    """Reads ``1,1.5:3,2:2:1``: a stage's forward; with its backward; or with the two parts of that."""
    from paceline.schedule.measure import ScheduleCosts, StageCost, equal_costs

    if text is None:
        return replace(equal_costs(found), communication=communication)
    stages = []
    for stage, part in enumerate(text.split(",")):
        try:
            numbers = [float(number) for number in part.split(":")]
        except ValueError:
            numbers = []
        match numbers:
            case [forward]:
                cost = StageCost(forward=forward, backward_input=forward, backward_weight=forward)
            case [forward, backward]:
                cost = StageCost(forward=forward, backward_input=backward / 2, backward_weight=backward / 2)
            case [forward, inputs, weights]:
                cost = StageCost(forward=forward, backward_input=inputs, backward_weight=weights)
            case _:
                raise UsageError(
                    f"--costs: {part!r} for stage {stage} is not a cost\n  it is forward, forward:backward or "
                    "forward:input:weights\n  for four stages, the last one slower, write --costs 1,1,1,1.5:3"
                )
        stages.append(cost)
    return ScheduleCosts(stages=tuple(stages), communication=communication)


def _write_csv(found: Schedule, target: str, *, with_messages: bool) -> None:
    from paceline.schedule.grid import lower
    from paceline.schedule.text import format_csv

    if with_messages:
        programs = lower(found)
        slots = max(map(len, programs))
        found = replace(found, rows=tuple((*program, *[None] * (slots - len(program))) for program in programs))
    if target == "-":
        echo(format_csv(found), nl=False)
        return
    write_output(Path(target), format_csv(found), "schedule")
