"""A schedule as a picture: a bar for each action, to scale, one line a rank.

Forwards are blue, whole backwards green, and their parts green (input) and yellow (weights); later chunks of the model
are darker. What is white is idle.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.schedule.grid import Action, Schedule
from paceline.schedule.measure import ScheduleMeasure, measure_schedule

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


def draw(schedule: Schedule, path: Path, measure: ScheduleMeasure | None = None) -> None:
    """Draws the schedule into a file; the ending (.png, .svg, .pdf) is its format. Raises UsageError for others."""
    from matplotlib.figure import Figure

    measure = measure or measure_schedule(schedule)
    figure = Figure(figsize=(min(24.0, max(6.0, 0.28 * _columns(measure))), 1.3 + 0.42 * schedule.ranks), dpi=110)
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise UsageError(
            f"a picture cannot be drawn into {path}\n  its ending is its format: {', '.join(sorted(formats))}\n"
            f"  try {path.with_suffix('.png')}"
        )
    axes = figure.subplots()
    _draw_bars(axes, schedule, measure)
    axes.set_xlim(0, measure.makespan)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_xlabel("time")
    axes.set_title(_title(schedule, measure), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"the picture cannot be written to {path}: {error}") from error


def _columns(measure: ScheduleMeasure) -> float:
    shortest = min(end - start for start, end in measure.times.values() if end > start)
    return measure.makespan / shortest


def _title(schedule: Schedule, measure: ScheduleMeasure) -> str:
    legends = [legend for kind, legend in _LEGEND.items() if any(action.kind == kind for action in measure.times)]
    return (
        f"{schedule.name}, {schedule.microbatches} microbatches: bubble {measure.bubble:.1%}, "
        f"at most {max(measure.in_flight_share):g} microbatches in flight\n" + ", ".join(legends)
    )


def _draw_bars(axes: Axes, schedule: Schedule, measure: ScheduleMeasure) -> None:
    is_plain = schedule.placement == tuple(range(schedule.ranks))
    has_labels = len(measure.times) <= _MOST_LABELS
    for rank, order in enumerate(schedule.compute_orders()):
        spans = [measure.times[action] for action in order]
        axes.barh(
            y=[rank] * len(order),
            width=[end - start for start, end in spans],
            left=[start for start, _ in spans],
            height=0.86,
            color=[_colour(action, schedule) for action in order],
            edgecolor="white",
            linewidth=0.6,
        )
        for action, (start, end) in zip(order, spans, strict=True) if has_labels else ():
            text = str(action.microbatch) if is_plain else f"{action.stage}.{action.microbatch}"
            axes.text((start + end) / 2, rank, text, ha="center", va="center", fontsize=7 if is_plain else 6)


def _colour(action: Action, schedule: Schedule) -> tuple[float, float, float]:
    """Mixes the colours of the first and the last chunk, by how far along its rank's chunks the stage is."""
    here = [stage for stage, home in enumerate(schedule.placement) if home == schedule.placement[action.stage]]
    share = here.index(action.stage) / max(1, len(here) - 1)
    light, dark = _COLOURS[action.kind]
    red, green, blue = (a + (b - a) * share for a, b in zip(light, dark, strict=True))
    return red, green, blue
