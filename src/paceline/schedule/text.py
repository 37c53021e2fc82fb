"""Schedules as text and pictures: a CSV file that people can edit, a grid for the terminal, bars in a file.

The file has one line a rank and one cell a slot; an empty cell is idleness. A first line that starts with # says what
the rows alone do not, and may be left out: then a stage is on the rank that has most of its actions, and there are as
many microbatches as the highest number says.

    # schedule=mine placement=0,1 microbatches=2
    F0.0,F0.1,    ,B0.0,    ,B0.1
        ,F1.0,B1.0,F1.1,B1.1,

Messages (SF, RF, SB, RB) and reduces (R) may be in the rows; without them they are placed by ``lower``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.charts import save_picture
from paceline.errors import UsageError
from paceline.schedule.grid import Action, Schedule, parse_action
from paceline.schedule.measure import ScheduleMeasure, measure_schedule
from paceline.untrusted import read_regular

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The first chunk's colour and the last one's: those between are mixed of them.
_COLOURS = {
    "F": ((0.55, 0.75, 0.95), (0.25, 0.50, 0.80)),
    "B": ((0.60, 0.85, 0.60), (0.25, 0.62, 0.35)),
    "I": ((0.60, 0.85, 0.60), (0.25, 0.62, 0.35)),
    "W": ((0.98, 0.88, 0.50), (0.90, 0.70, 0.20)),
}
_LEGEND = {"F": "blue: forward", "B": "green: backward", "I": "green: backward to inputs", "W": "yellow: to weights"}
_MOST_LABELS = 1500  # with more, they could not be read, and the picture would take minutes
_HEADER_KEYS = ("schedule", "placement", "microbatches")
_MOST_CELLS = 2**24
_PAIR = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|$)")


def format_csv(schedule: Schedule) -> str:
    """Returns the lines of the file: the header, then one row a rank, with its cells below one another."""
    cells = [[str(action or "") for action in row] for row in schedule.rows]
    width = max((len(cell) for row in cells for cell in row), default=0)
    placement = ",".join(map(str, schedule.placement))
    header = f"# schedule={schedule.name} placement={placement} microbatches={schedule.microbatches}"
    return "\n".join([header, *(",".join(cell.ljust(width) for cell in row).rstrip() for row in cells)]) + "\n"


def read_csv(path: Path) -> Schedule:
    """Reads a schedule from a file, for ``check_schedule`` to check. Raises UsageError, which names the cell."""
    try:
        text = read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a schedule: {error}\n  it must be a CSV file, in UTF-8") from error
    return parse_csv(text, source=str(path))


def parse_csv(text: str, *, source: str = "schedule") -> Schedule:
    """Returns the schedule that the lines of such a file say. ``source`` is its name, and goes into messages."""
    lines = text.lstrip("\ufeff").splitlines()
    header = dict(pair for line in lines if line.startswith("#") for pair in _PAIR.findall(line.rstrip()))
    if unknown := set(header) - set(_HEADER_KEYS):
        raise UsageError(
            f"{source}: the line that starts with # sets {', '.join(sorted(unknown))}\n"
            f"  it may set {', '.join(_HEADER_KEYS)}"
        )
    # Blank lines at the end are no ranks; one in between is a rank that does nothing, and is found as such.
    body = "\n".join(line for line in lines if not line.startswith("#")).rstrip().splitlines()
    if not body:
        raise UsageError(f"{source} has no rows\n  a schedule has one line a rank, of cells such as F0.3 and commas")
    rows: list[list[Action | None]] = []
    for rank, line in enumerate(body):
        row: list[Action | None] = []
        for slot, cell in enumerate(line.rstrip(", \t").split(",")):
            try:
                row.append(parse_action(cell) if cell.strip() else None)
            except UsageError as error:
                raise UsageError(f"{source}, rank {rank}, slot {slot}: {error}") from error
        rows.append(row)
    slots = max(map(len, rows))
    if len(rows) * slots > _MOST_CELLS:
        raise UsageError(
            f"{source} has {len(rows):,} rows of up to {slots:,} slots\n  a schedule has up to {_MOST_CELLS:,} cells"
        )
    padded = tuple((*row, *[None] * (slots - len(row))) for row in rows)
    placement = _numbers(header, "placement", source) or _placement(rows, source)
    last = max((action.microbatch for row in rows for action in row if action), default=-1)
    (microbatches, *_) = _numbers(header, "microbatches", source) or (last + 1,)
    name = header.get("schedule", Path(source).stem)
    return Schedule(name=name, rows=padded, placement=placement, microbatches=microbatches)


def _numbers(header: dict[str, str], what: str, source: str) -> tuple[int, ...]:
    text = header.get(what)
    if text is None:
        return ()
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise UsageError(f"{source}: {what}={text} is not made of whole numbers\n  write {what}=0,1,2, say") from error


def _placement(rows: Sequence[Sequence[Action | None]], source: str) -> tuple[int, ...]:
    """Places each stage where most of its actions are, so that a single one elsewhere is on the wrong rank."""
    votes: dict[int, Counter[int]] = {}
    for rank, row in enumerate(rows):
        for action in filter(None, row):
            votes.setdefault(action.stage, Counter())[rank] += 1
    missing = next((stage for stage in range(len(votes)) if stage not in votes), None)
    if missing is not None:
        raise UsageError(
            f"{source}: no rank runs stage {missing}, and there is a stage {max(votes)}\n"
            "  stages are numbered from 0, without gaps"
        )
    return tuple(votes[stage].most_common(1)[0][0] for stage in range(len(votes)))


_Spans = dict[Action, tuple[int, int]]


def render_text(schedule: Schedule, measure: ScheduleMeasure | None = None, *, width: int = 120) -> str:
    """Returns a grid of who does what when, by units of time or slots; and what each rank idles and holds."""
    measure = measure or measure_schedule(schedule)
    unit, spans = _columns(schedule, measure)
    labels = "F3 is the forward of microbatch 3"
    labels = labels if _is_plain(schedule) else f"F1.{labels[1:]} in stage 1"
    parts = "I and W are the two parts of a backward" if schedule.splits_backward else "B is a backward"
    table = ["         stages      idle     in flight at most"]
    for rank in range(schedule.ranks):
        stages = ",".join(str(stage) for stage, home in enumerate(schedule.placement) if home == rank)
        idle = 1 - measure.busy[rank] / measure.makespan
        table.append(f"rank {rank:<4}{stages:<12}{idle:<9.1%}{measure.in_flight[rank]}")
    work = sum(measure.busy) / len(measure.busy)
    lines = [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches",
        f"{labels}, {parts}; a column is {'a slot' if unit is None else f'{unit:g} of time'}",
        "",
        *_grid(schedule, spans, width),
        *table,
        "",
        f"makespan {measure.makespan:g} for {work:g} of work a rank",
        f"bubble   {measure.bubble:.1%} of the makespan is idle, {measure.overhead:.1%} relative to the work",
    ]
    return "\n".join(lines)


def _is_plain(schedule: Schedule) -> bool:
    """Says whether rank r holds stage r alone, so that a label need not name the stage."""
    return schedule.placement == tuple(range(schedule.ranks))


def _grid(schedule: Schedule, spans: _Spans, width: int) -> list[str]:
    labels = {action: f"{action.kind}{action.microbatch}" if _is_plain(schedule) else str(action) for action in spans}
    cell = max(map(len, labels.values()), default=1) + 1
    num_columns = max(end for _, end in spans.values())
    lines = [["."] * num_columns for _ in range(schedule.ranks)]
    for action, (start, end) in spans.items():
        line = lines[schedule.placement[action.stage]]
        more = ["-" * (cell - 1)] * (end - start - 1)
        line[start:end] = [labels[action].ljust(cell - 1, "-" if more else " "), *more]
    # An action over several columns is one bar: the gap after a column is filled unless the action ends there.
    ends = {(schedule.placement[action.stage], end) for action, (_, end) in spans.items()}
    per_block = max(1, (width - 9) // cell)
    output: list[str] = []
    for first in range(0, num_columns, per_block):
        columns = range(first, min(first + per_block, num_columns))
        output.append("column".ljust(9) + "".join(str(column).ljust(cell) for column in columns).rstrip())
        for rank, line in enumerate(lines):
            texts = [line[c] + ("-" if line[c] != "." and (rank, c + 1) not in ends else " ") for c in columns]
            output.append(f"rank {rank}".ljust(9) + "".join(text.ljust(cell) for text in texts).rstrip())
        output.append("")
    return output


def _columns(schedule: Schedule, measure: ScheduleMeasure) -> tuple[float | None, _Spans]:
    """Returns the time that a column is (None: it is a slot), and each action's first column and its end."""
    unit = min((end - start for start, end in measure.times.values() if end > start), default=1.0)
    in_units = {action: (start / unit, end / unit) for action, (start, end) in measure.times.items()}
    rounded = {action: (round(start), round(end)) for action, (start, end) in in_units.items()}
    is_whole = all(
        max(abs(first - start), abs(last - end)) < 1e-6 and last > first
        for (first, last), (start, end) in zip(rounded.values(), in_units.values(), strict=True)
    )
    if is_whole:
        return unit, rounded
    rows = [[action for action in row if action is None or action.is_compute] for row in schedule.rows]
    return None, {action: (slot, slot + 1) for row in rows for slot, action in enumerate(row) if action}


def draw(schedule: Schedule, path: Path, measure: ScheduleMeasure | None = None) -> None:
    """Draws the schedule into a file; the ending (.png, .svg, .pdf) is its format. Raises UsageError for others."""
    from matplotlib.figure import Figure

    measure = measure or measure_schedule(schedule)
    shortest = min(end - start for start, end in measure.times.values() if end > start)
    size = (min(24.0, max(6.0, 0.28 * measure.makespan / shortest)), 1.3 + 0.42 * schedule.ranks)
    figure = Figure(figsize=size, dpi=110)
    axes = figure.subplots()
    _draw_bars(axes, schedule, measure)
    axes.set_xlim(0, measure.makespan)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_xlabel("time")
    legends = [legend for kind, legend in _LEGEND.items() if any(action.kind == kind for action in measure.times)]
    title = (
        f"{schedule.name}, {schedule.microbatches} microbatches: bubble {measure.bubble:.1%}, "
        f"at most {max(measure.in_flight_share):g} microbatches in flight\n" + ", ".join(legends)
    )
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)


def _draw_bars(axes: Axes, schedule: Schedule, measure: ScheduleMeasure) -> None:
    is_plain, has_labels = _is_plain(schedule), len(measure.times) <= _MOST_LABELS
    for rank, order in enumerate(schedule.compute_orders()):
        spans = [measure.times[action] for action in order]
        here = [stage for stage, home in enumerate(schedule.placement) if home == rank]
        colours = []
        for action in order:  # mixed of the first chunk's and the last one's, by how far along the stage is
            share = here.index(action.stage) / max(1, len(here) - 1)
            colours.append(tuple(a + (b - a) * share for a, b in zip(*_COLOURS[action.kind], strict=True)))
        axes.barh(
            y=[rank] * len(order),
            width=[end - start for start, end in spans],
            left=[start for start, _ in spans],
            height=0.86,
            color=colours,
            edgecolor="white",
            linewidth=0.6,
        )
        for action, (start, end) in zip(order, spans, strict=True) if has_labels else ():
            text = str(action.microbatch) if is_plain else f"{action.stage}.{action.microbatch}"
            axes.text((start + end) / 2, rank, text, ha="center", va="center", fontsize=7 if is_plain else 6)
