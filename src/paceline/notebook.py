"""What a notebook shows: results as tables with small charts, pictures, and a bar that moves.

A notebook asks an object for ``_repr_html_``; a terminal, and a list of results, for its ``repr``, which is one line.
All text is escaped: names and messages of a run are text, wherever they are shown.
"""

from __future__ import annotations

import html
import io
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _MARGIN = 320, 90, 6
_MOST_POINTS = 240


class Shown:
    """A result: one line as text, a table of its ``facts`` in a notebook. A dataclass takes it with ``repr=False``."""

    __slots__ = ()

    def facts(self) -> Mapping[str, object]:
        """Returns what there is to say, by a word or two each; None where it is not known."""
        raise NotImplementedError

    def charts(self) -> Sequence[str]:
        return ()

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {_text(value)}" for name, value in self.facts().items() if value is not None)
        return f"<{type(self).__name__}: {told}>"

    def _repr_html_(self) -> str:
        rows = [(name, value) for name, value in self.facts().items() if value is not None]
        return f"<b>{html.escape(type(self).__name__)}</b>{table(('', ''), rows)}{''.join(self.charts())}"


def table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns rows as a table of HTML; the first column is text, the others are to the right."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names) if any(names) else ""
    body = ""
    for row in rows:
        body += "<tr>"
        for place, value in enumerate(row):
            side = "right" if place else "left"
            body += f'<td style="text-align:{side}">{html.escape(_text(value))}</td>'
        body += "</tr>"
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def curve(title: str, values: Sequence[float | None]) -> str:
    """Returns a small chart of a curve as SVG, with its first and last value; nothing for fewer than two points."""
    known = [(place, value) for place, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    first, last = known[0][1], known[-1][1]
    stride = -(-len(known) // _MOST_POINTS)
    points = [*known[:-1:stride], known[-1]]
    low, high = min(value for _, value in points), max(value for _, value in points)
    wide, tall = (_WIDTH - 2 * _MARGIN) / points[-1][0], _HEIGHT - 2 * _MARGIN
    span = (high - low) or 1.0
    path = " ".join(f"{_MARGIN + x * wide:.1f},{_HEIGHT - _MARGIN - (y - low) / span * tall:.1f}" for x, y in points)
    return (
        f'<figure style="display:inline-block;margin:4px"><svg width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f'<polyline points="{path}" fill="none" stroke="#2a6f97" stroke-width="1.5"/></svg>'
        f"<figcaption>{html.escape(title)}: {first:.4g} to {last:.4g}</figcaption></figure>"
    )


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def new_figure(**options: Any) -> Figure:
    """Returns an empty figure of matplotlib that a notebook shows when a cell returns it, without a magic line."""
    from matplotlib.figure import Figure as Plain

    class Figure(Plain):
        def _repr_svg_(self) -> str:
            text = io.StringIO()
            self.savefig(text, format="svg")
            return text.getvalue()

    return Figure(**options)


def is_notebook() -> bool:
    """Says whether this process is a notebook's kernel, which shows what a cell returns."""
    ipython = sys.modules.get("IPython")  # a kernel has loaded it
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def cell_display() -> Any | None:
    """Returns a new place in the output of the cell that runs now, IPython's; None outside of a notebook's kernel."""
    if not is_notebook():
        return None
    return sys.modules["IPython"].display.display({"text/plain": ""}, raw=True, display_id=True)


def show_bar(display: Any, share: float, text: str) -> None:
    """Shows a bar, filled to ``share``, over lines of text; where there is no HTML the lines alone."""
    bar = f'<progress value="{min(max(share, 0.0), 1.0):.4f}" max="1" style="width:24em"></progress>'
    display.update({"text/plain": text, "text/html": f"{bar}<pre>{html.escape(text)}</pre>"}, raw=True)
