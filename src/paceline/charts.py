"""Charts: curves over epochs, ranks or devices, drawn as the live page draws them, and the files of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The colours of view/page/page.css and format.js: of runs, and of texts, lines and cards.
COLORS = ("#5753c6", "#d9730d", "#0d8a72", "#c2378a", "#2f7fd1", "#8a7a0a", "#7b4fb8", "#5a6b7a")
PAGE, TEXT, DIM, LINE, GRID = "#f7f7f8", "#1c1c22", "#6a6b76", "#e4e4e9", "#ececf0"


class Line(NamedTuple):
    """A curve: its points (nan: none there), its label in the legend, and matplotlib's options for its look."""

    x: Any  # numbers, in a sequence or an array
    y: Any
    label: str = ""
    look: Mapping[str, Any] = MappingProxyType({})


def draw_lines(axes: Axes, lines: Sequence[Line], *, counts: Sequence[int] = (), **labels: str) -> None:
    """Draws curves with ``labels`` for title and axes. ``counts``, of ranks say, have a logarithmic axis with each."""
    for line in lines:
        axes.plot(line.x, line.y, **{"label": line.label or None, **line.look})
    if any(line.label for line in lines):
        axes.legend(fontsize=8, frameon=False, labelcolor=DIM)
    if counts:
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
    dress(axes, **labels)


def dress(axes: Axes, title: str = "", **labels: str) -> None:
    """Gives a chart the look of a card of the page: its title on the left, a faint grid, quiet axes."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=TEXT)
    axes.set(**labels)
    axes.xaxis.label.set(color=DIM, size=8)
    axes.yaxis.label.set(color=DIM, size=8)
    axes.spines[:].set_color(LINE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=DIM, labelsize=8, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a picture; its ending (.png, .svg, .pdf) is its format. Raises UsageError for others."""
    import matplotlib

    formats, ending = figure.canvas.get_supported_filetypes(), path.suffix.removeprefix(".")
    if ending not in formats:
        rule = f"its ending is its format: {', '.join(sorted(formats))}"
        raise UsageError(f"a picture cannot be drawn into {path}\n  {rule}\n  try {path.with_suffix('.png')}")
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    dates = {"svg": "Date", "pdf": "CreationDate"}  # left out, so that the same picture is the same file
    try:
        with matplotlib.rc_context({"svg.hashsalt": "paceline"}):
            figure.savefig(path, metadata={dates[ending]: None} if ending in dates else None)
    except OSError as error:
        raise UsageError(f"the picture cannot be written to {path}: {error}") from error
