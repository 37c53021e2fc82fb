"""Runs as files for other programs: curves as CSV, charts as PNG or SVG."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import RunFolderError
from paceline.records.summary import PHASES
from paceline.view.document import rounded
from paceline.view.runs import ShownRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (
    *("epoch", "loss", "lr", "grad_norm", "samples_per_s", "step_s", *PHASES, "host_s", "memory_bytes"),
    *("flops_per_s", "mfu"),
)
_COLORS = ("#5753c6", "#d9730d", "#0d8a72", "#c2378a", "#2f7fd1", "#8a7a0a")
_PHASE_COLORS = ("#3b8fd6", "#6ab187", "#2f7d60", "#d8434f", "#e0a32e")


def write_csv(runs: Sequence[ShownRun], path: Path) -> None:
    """Writes a line for each step of each run: what all ranks did together, in the units of the records."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["run", "step", "time", *_COLUMNS])
    for run in runs:
        curves = run.columns.curves()
        values = [rounded(curves[name], 7) for name in _COLUMNS]
        for step, time, *row in zip(run.columns.steps, curves["time"], *values, strict=True):
            # A name that a spreadsheet would take for a formula is marked as text.
            name = f"'{run.name}" if run.name[:1] in "=+-@" else run.name
            cells = ["" if value != value else repr(value) for value in row]
            lines.writerow([name, int(step), f"{time:.3f}", *cells])
    write_file(path, text.getvalue().encode())


def write_figure(runs: Sequence[ShownRun], path: Path, kind: str) -> None:
    """Draws loss, throughput, step time and memory of runs, phases and the map of ranks of the first one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    axes: Any = figure.subplots(2, 3)
    unit = "samples" if runs[0].lead is None else runs[0].lead.unit
    panels = (
        ("loss", "loss", 1.0),
        ("samples_per_s", f"{unit}/s", None),
        ("step_s", "step time of the slowest rank, ms", 1e3),
    )
    for axis, (name, title, scale) in zip((axes[0, 0], axes[0, 1], axes[0, 2]), panels, strict=True):
        _lines(axis, runs, name, title, scale)
    _lines(axes[1, 0], runs, "memory_bytes", "memory of the largest rank, GiB", 2**-30)
    _phases(axes[1, 1], runs[0])
    _map(axes[1, 2], runs[0])
    figure.suptitle(", ".join(_plain(run.name) for run in runs), fontsize=11)
    made = io.BytesIO()
    figure.savefig(made, format=kind, dpi=130)
    write_file(path, made.getvalue())


def _lines(axis: Axes, runs: Sequence[ShownRun], name: str, title: str, scale: float | None) -> None:
    for place, run in enumerate(runs):
        factor = scale if scale is not None else 1.0 if run.lead is None else run.lead.units_per_sample
        values = run.columns.curves()[name] * factor
        color = _COLORS[place % len(_COLORS)]
        axis.plot(run.columns.steps, values, color=color, linewidth=1.0, label=_plain(run.name))
    _finish(axis, title, has_legend=len(runs) > 1)


def _phases(axis: Axes, run: ShownRun) -> None:
    curves = run.columns.curves()
    parts = [1e3 * np.nan_to_num(curves[name]) for name in PHASES]
    names = [name.removesuffix("_s") for name in PHASES]
    axis.stackplot(run.columns.steps, *parts, labels=names, colors=_PHASE_COLORS)
    _finish(axis, "phases of a step, mean of the ranks, ms", has_legend=True)


def _map(axis: Axes, run: ShownRun) -> None:
    ranks, steps, values = run.columns.heat("step_s", slice(None), 600)
    if values.size:
        low, high = np.nanpercentile(values, (2, 98))
        extent = (float(steps[0]), float(steps[-1]) + 1, len(ranks) - 0.5, -0.5)
        shown = axis.imshow(1e3 * values, aspect="auto", extent=extent, vmin=1e3 * low, vmax=1e3 * high)
        axis.figure.colorbar(shown, ax=axis, shrink=0.8)
    _finish(axis, "step time by rank and step, ms", has_legend=False)


def _finish(axis: Axes, title: str, *, has_legend: bool) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.tick_params(labelsize=8)
    if has_legend:
        axis.legend(fontsize=8, loc="upper right")


def _plain(name: str) -> str:
    """Returns a name that is drawn as it is: dollars begin formulas, and an underscore hides a label."""
    shown = name.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def write_file(path: Path, content: bytes) -> None:
    """Writes a file, and the folder that it lies in. Raises RunFolderError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}\n  give a file in a folder that can be written"
        ) from error
