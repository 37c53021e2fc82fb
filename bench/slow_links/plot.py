"""A record of the links as a picture: how much of the time bound each algorithm reaches, and how long a step takes.

Plain SVG, so that nothing has to be installed to draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from slow_links.arms import COMPUTE
from slow_links.table import place_of

Row = dict[str, Any]

_PANEL, _LABEL, _BAR, _TITLE, _GAP = 560, 165, 16, 22, 20  # pixels
_LENGTH = _PANEL - _LABEL - 70  # of the longest bar
_GOAL = 0.85
_INK, _REDUCTION, _STEP, _MARK = "#222222", "#4c78a8", "#72b7b2", "#e45756"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture: a column for each placement; for each speed the large all-reduces, then training steps."""
    places = dict.fromkeys((row["hosts"], row["ranks"]) for row in rows)
    shapes: list[str] = []
    height = 0
    for column, place in enumerate(places):
        here = [row for row in rows if (row["hosts"], row["ranks"]) == place and row["part"] != "speed_up"]
        top = 10
        for speed in dict.fromkeys(row["bits_per_second"] for row in here):
            at_speed = [row for row in here if row["bits_per_second"] == speed]
            for panel in (_reductions(at_speed), _steps(at_speed)):
                shapes.append(f'<g transform="translate({10 + column * _PANEL},{top})">{"".join(panel)}</g>')
                top += _TITLE + _BAR * (len(panel) // 4) + _GAP
        height = max(height, top)
    width = 20 + len(places) * _PANEL
    style = f'font-family="sans-serif" font-size="11" fill="{_INK}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>'
    text = "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _reductions(rows: Sequence[Row]) -> list[str]:
    """Bars of the fraction reached, of the largest all-reduces; the mark is the goal."""
    reductions = [row for row in rows if row["part"] == "all_reduce"]
    size = max((row["size_bytes"] for row in reductions), default=0)
    found = _title(rows, f"all-reduce of {size / 2**20:g} MiB: part of the time bound; mark at {_GOAL:.0%}")
    for place, row in enumerate(row for row in reductions if row["size_bytes"] == size):
        found += _bar(place, row["arm"], row["fraction"], _REDUCTION, f"{row['fraction']:.1%}", _GOAL)
    return found


def _steps(rows: Sequence[Row]) -> list[str]:
    """Bars of milliseconds of a training step; the mark is the bound of its bytes."""
    steps = [row for row in rows if row["part"] == "training"]
    longest = max((row["median_ms"] for row in steps), default=1.0)
    found = _title(rows, "training step, ms; mark: bound of its bytes")
    for place, row in enumerate(steps):
        mark = 0.0 if row["arm"] == COMPUTE else (row["bound_ms"] or 0.0) / longest
        found += _bar(place, row["arm"], row["median_ms"] / longest, _STEP, f"{row['median_ms']:.0f}", mark)
    return found


def _title(rows: Sequence[Row], what: str) -> list[str]:
    where = f"{place_of(rows[0])} ranks, {rows[0]['bits_per_second'] / 1e6:g} Mbit/s" if rows else ""
    return [f'<text y="12" font-weight="bold">{escape(where)}: {escape(what)}</text>']


def _bar(place: int, label: str, share: float, colour: str, value: str, mark: float) -> list[str]:
    """Returns four shapes: the label, the bar, its value, and the mark."""
    top, length = _TITLE + place * _BAR, share * _LENGTH
    at = _LABEL + mark * _LENGTH
    return [
        f'<text x="{_LABEL - 6}" y="{top + 11}" text-anchor="end">{escape(label)}</text>',
        f'<rect x="{_LABEL}" y="{top + 2}" width="{length:.1f}" height="{_BAR - 5}" fill="{colour}"/>',
        f'<text x="{max(_LABEL + length, at) + 5:.1f}" y="{top + 11}">{escape(value)}</text>',
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + _BAR - 1}" stroke="{_MARK}" stroke-width="2"/>',
    ]
