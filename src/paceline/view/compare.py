"""Runs side by side on a console: their figures, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from paceline.records.console import format_loss, format_percent
from paceline.records.report import RunSummary
from paceline.units import format_bytes, format_seconds
from paceline.view.html import differences_of
from paceline.view.runs import Run

_WORTH = 0.05  # of a figure: a smaller change is no change


def render_compared(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> RenderableType:
    """Draws what differs between runs; a figure that is more than 5 % off that of the first run says by how much."""
    figures = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    figures.add_column("")
    for run in runs:
        figures.add_column(run.name, justify="right")
    for title, pick, write in _ROWS:
        values = [pick(summary) for summary in summaries]
        if any(value is not None for value in values):
            figures.add_row(title, *_changes(values, write))
    parts: list[RenderableType] = [figures]
    if differing := differences_of(runs):
        settings = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        settings.add_column("setting")
        for run in runs:
            settings.add_column(run.name, justify="right")
        for name, values in differing:
            settings.add_row(name, *(value or "-" for value in values))
        parts += ["", settings]
    return Group(*parts)


def _changes(values: Sequence[float | None], write: Any) -> list[str]:
    first = values[0]
    shown = []
    for place, value in enumerate(values):
        text = "-" if value is None else write(value)
        if place and value is not None and first and abs(value / first - 1) > _WORTH:
            text += f" ({100 * (value / first - 1):+.0f} %)"
        shown.append(text)
    return shown


def _step_s(summary: RunSummary) -> float | None:
    return max((rank.step_s for rank in summary.ranks if rank.steps), default=None)


_ROWS: tuple[tuple[str, Any, Any], ...] = (
    ("steps", lambda summary: summary.steps, lambda value: f"{value:,}"),
    ("training loss", lambda summary: summary.final_loss, format_loss),
    ("test loss", lambda summary: summary.test_loss, format_loss),
    ("test accuracy", lambda summary: summary.test_accuracy, format_percent),
    ("throughput (units/s)", lambda summary: summary.units_per_s, lambda value: f"{value:,.0f}"),
    ("MFU", lambda summary: summary.mfu, format_percent),
    ("step, median of the slowest rank", _step_s, format_seconds),
    ("exposed communication", lambda summary: summary.comm_share, format_percent),
    ("memory", lambda summary: max((rank.memory_bytes for rank in summary.ranks), default=None), format_bytes),
    ("duration", lambda summary: summary.seconds, format_seconds),
)
