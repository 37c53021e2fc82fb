"""Scaling as a picture: predicted throughput and efficiency over the number of devices, strong and weak.

Numbers of devices without a plan have no point. The dashed line is the first point's throughput, device by device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.search.scaling import ScalingRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"strong": ("tab:blue", "o", "same batch"), "weak": ("tab:orange", "s", "same samples a device")}


def draw_scaling(tables: Mapping[str, Sequence[ScalingRow]], path: Path, title: str) -> None:
    """Draws the tables into a file; the ending (.png, .svg, .pdf) is its format. Raises UsageError for others.

    ``tables``: rows of strong and weak scaling by these names, with a plan in one row at least.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), dpi=110)
    formats = figure.canvas.get_supported_filetypes()
    ending = path.suffix.removeprefix(".")
    if ending not in formats:
        raise UsageError(
            f"a picture cannot be drawn into {path}\n  its ending is its format: {', '.join(sorted(formats))}\n"
            f"  try {path.with_suffix('.png')}"
        )
    throughput, efficiency = figure.subplots(1, 2)
    planned = {name: found for name, rows in tables.items() if (found := [row for row in rows if row.best])}
    _draw_throughput(throughput, planned)
    _draw_efficiency(efficiency, planned)
    counts = sorted({row.devices for rows in planned.values() for row in rows})
    for axes in (throughput, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}: predicted, not measured", fontsize=10)
    figure.tight_layout()
    dates = {"svg": "Date", "pdf": "CreationDate"}  # left out, so that the same plan is the same file
    try:
        with matplotlib.rc_context({"svg.hashsalt": "paceline"}):
            figure.savefig(path, metadata={dates[ending]: None} if ending in dates else None)
    except OSError as error:
        raise UsageError(f"the picture cannot be written to {path}: {error}") from error


def _draw_throughput(axes: Axes, tables: Mapping[str, Sequence[ScalingRow]]) -> None:
    for name, rows in tables.items():
        colour, marker, words = _STYLES[name]
        counts, rates = [row.devices for row in rows], [row.best.tokens_per_s for row in rows if row.best]
        axes.plot(counts, rates, color=colour, marker=marker, label=f"{name}: {words}")
        ends = (counts[0], counts[-1])
        axes.plot(ends, [rates[0] / counts[0] * end for end in ends], color=colour, linestyle="--", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value / 1000:,.0f} k")
    axes.set_ylabel("predicted tokens/s")
    axes.legend(fontsize=8, frameon=False)


def _draw_efficiency(axes: Axes, tables: Mapping[str, Sequence[ScalingRow]]) -> None:
    for name, rows in tables.items():
        colour, marker, _ = _STYLES[name]
        shares = [100 * row.efficiency for row in rows]
        axes.plot([row.devices for row in rows], shares, color=colour, marker=marker, label=name)
    axes.axhline(100, color="grey", linestyle="--", linewidth=0.8)
    most = max(row.efficiency for rows in tables.values() for row in rows)
    axes.set_ylim(0, 105 * max(1.0, most))
    axes.set_ylabel("predicted efficiency, %")
