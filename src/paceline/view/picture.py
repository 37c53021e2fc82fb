"""The main charts of runs as one picture, as the page has them: the loss first, smoothed over its faint values."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.charts import COLORS, DIM, PAGE, TEXT, Line, draw_lines, dress
from paceline.records.summary import PHASES
from paceline.view.columns import Array
from paceline.view.html import write_file
from paceline.view.runs import ShownRun

_PHASE_COLORS = ("#3b8fd6", "#6ab187", "#2f7d60", "#d8434f", "#e0a32e")
_PLACES = [["loss", "loss", "samples_per_s"], ["step_s", "memory_bytes", "phases"], ["ranks", "ranks", "ranks"]]


def write_figure(runs: Sequence[ShownRun], path: Path, kind: str) -> None:
    """Draws loss, throughput, step time and memory of runs, phases and the map of ranks of the first one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9.5), layout="constrained", facecolor=PAGE)
    axes: Any = figure.subplot_mosaic(_PLACES, height_ratios=[1.4, 1, 0.6])  # type: ignore[arg-type]
    unit = "samples" if runs[0].lead is None else runs[0].lead.unit
    panels = (
        ("loss", "Loss", "loss", 1.0),
        ("samples_per_s", "Throughput", f"{unit}/s", None),
        ("step_s", "Step time of the slowest rank", "ms", 1e3),
        ("memory_bytes", "Memory of the largest rank", "GiB", 2**-30),
    )
    for name, title, label, scale in panels:
        draw_lines(axes[name], list(_lines(runs, name, scale)), title=title, xlabel="step", ylabel=label)
    columns, phases = runs[0].columns, axes["phases"]
    parts = [1e3 * np.nan_to_num(columns.curves()[name]) for name in PHASES]
    names = [name.removesuffix("_s") for name in PHASES]
    phases.stackplot(columns.steps, *parts, labels=names, colors=_PHASE_COLORS)
    phases.legend(fontsize=8, loc="upper right", labelcolor=DIM, edgecolor="none")
    axes["memory_bytes"].set_ylim(bottom=0)
    dress(phases, title="Where a step's time goes, mean of the ranks", xlabel="step", ylabel="ms")
    _draw_ranks(figure, axes["ranks"], runs[0])
    told = runs[0].state().sentence if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(f"{', '.join(_plain(run.name) for run in runs)}: {_plain(told)}", x=0.01, ha="left", color=TEXT)
    made = io.BytesIO()
    figure.savefig(made, format=kind, dpi=130)
    write_file(path, made.getvalue())


def _draw_ranks(figure: Any, axes: Any, run: ShownRun) -> None:
    ranks, steps, values = run.columns.heat("step_s", slice(None), 600)
    dress(axes, title="Step time by rank and step, ms", xlabel="step", ylabel="rank")
    axes.grid(visible=False)
    if values.size:
        low, high = 1e3 * np.nanpercentile(values, (2, 98))
        extent = (float(steps[0]), float(steps[-1]) + 1, len(ranks) - 0.5, -0.5)
        shown = axes.imshow(1e3 * values, aspect="auto", interpolation="nearest", extent=extent, vmin=low, vmax=high)
        axes.yaxis.get_major_locator().set_params(integer=True)
        bar = figure.colorbar(shown, cax=axes.inset_axes((0.82, 1.07, 0.18, 0.07)), orientation="horizontal")
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=DIM, labelsize=8, length=0, labeltop=True, labelbottom=False)


def _lines(runs: Sequence[ShownRun], name: str, scale: float | None) -> Iterator[Line]:
    """Yields the values of each run, faint, and what they are smoothed; of the loss also evaluations, dashed."""
    for place, run in enumerate(runs):
        factor = scale if scale is not None else 1.0 if run.lead is None else run.lead.units_per_sample
        sole = "training" if name == "loss" and run.evaluations else ""
        values, label = run.columns.curves()[name] * factor, _plain(run.name) if len(runs) > 1 else sole
        color = COLORS[place % len(COLORS)]
        if name != "memory_bytes":
            yield Line(run.columns.steps, values, "", {"color": color, "linewidth": 0.8, "alpha": 0.3})
            values = smoothed(values)
        yield Line(run.columns.steps, values, label, {"color": color, "linewidth": 1.6})
        if name == "loss" and run.evaluations:
            steps, losses = [each.step for each in run.evaluations], [each.loss for each in run.evaluations]
            look = {"color": COLORS[1] if sole == label else color, "linewidth": 1.2, "linestyle": "--", "marker": "o"}
            told = "evaluation" if sole == label else f"{label}, evaluation"
            yield Line(steps, losses, told, look | {"markersize": 3})


def smoothed(values: Array, weight: float = 0.6) -> Array:
    """Returns values smoothed exponentially, both ways so that they do not lag behind; gaps stay gaps."""

    def one_way(each: Array) -> Array:
        mean, norm, found = 0.0, 0.0, np.full(len(each), np.nan)
        for place in np.flatnonzero(np.isfinite(each)):
            mean = weight * mean + (1 - weight) * each[place]
            norm = weight * norm + (1 - weight)
            found[place] = mean / norm
        return found

    return (one_way(values) + one_way(values[::-1])[::-1]) / 2


def _plain(name: str) -> str:
    """Returns a name that is drawn as it is: dollars begin formulas, and an underscore hides a label."""
    shown = name.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
