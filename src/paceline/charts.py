"""Charts: curves over epochs, ranks or devices, drawn in one way, and the files that pictures are written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Line(NamedTuple):
    """A curve: its points (nan: none there), its label in the legend, and matplotlib's options for its look."""

    x: Any  # numbers, in a sequence or an array
    y: Any
    label: str = ""
    look: Mapping[str, Any] = MappingProxyType({})


def draw_lines(axes: Axes, lines: Sequence[Line], *, counts: Sequence[int] = (), **labels: str) -> None:
    """Draws curves, with a legend where they have labels, and ``labels`` of the chart: title, xlabel, ylabel.

    ``counts`` of ranks or devices: what the curves are over, on a logarithmic axis that names each of them.
    """
    for line in lines:
        axes.plot(line.x, line.y, **{"label": line.label or None, **line.look})
    if any(line.label for line in lines):
        axes.legend(fontsize=8, frameon=False)
    if counts:
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a picture; its ending (.png, .svg, .pdf) is its format. Raises UsageError for others."""
    import matplotlib

    formats, ending = figure.canvas.get_supported_filetypes(), path.suffix.removeprefix(".")
    if ending not in formats:
        raise UsageError(
            f"a picture cannot be drawn into {path}\n  its ending is its format: {', '.join(sorted(formats))}\n"
            f"  try {path.with_suffix('.png')}"
        )
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    dates = {"svg": "Date", "pdf": "CreationDate"}  # left out, so that the same picture is the same file
    try:
        with matplotlib.rc_context({"svg.hashsalt": "paceline"}):
            figure.savefig(path, metadata={dates[ending]: None} if ending in dates else None)
    except OSError as error:
        raise UsageError(f"the picture cannot be written to {path}: {error}") from error
