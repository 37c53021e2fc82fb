"""How a model scales: the best plan for each number of devices, with the batch as it is (strong) or grown (weak).

efficiency = throughput a device / that of the smallest number that has a plan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.charts import Line, draw_lines, save_picture
from paceline.cluster.devices import Cluster
from paceline.errors import UsageError
from paceline.predict.formulas.step import Prediction
from paceline.search.candidates import TrainingTask, resized
from paceline.search.search import Order, search


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """The best plan for a number of devices; ``best`` is None where there is none, and ``why`` says so."""

    devices: int
    global_batch: int
    best: Prediction | None
    efficiency: float = 0.0
    why: str = ""


def scaling_rows(
    task: TrainingTask,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    weak: bool,
    order: Order = "time",
    host_memory: float = float("inf"),
) -> list[ScalingRow]:
    """Plans for each number of devices; weak: with the same samples a device. Raises UsageError."""
    rows: list[ScalingRow] = []
    first: float | None = None  # throughput a device
    for each in [resized(cluster, count) for count in sorted(set(counts))]:
        batch, rest = divmod(task.global_batch * each.devices, cluster.devices) if weak else (task.global_batch, 0)
        row = ScalingRow(devices=each.devices, global_batch=batch, best=None, why="out of memory")
        try:
            if rest or not batch:
                whole = f"{task.global_batch} samples on {cluster.devices} devices"
                raise UsageError(f"{whole} are no whole number on {each.devices}")
            found = search(replace(task, global_batch=batch), each, order=order, host_memory=host_memory)
        except UsageError as error:
            rows.append(replace(row, why=error.headline))
            continue
        if found.ranked:
            rate = found.ranked[0].tokens_per_s / each.devices
            first = rate if first is None else first
            row = replace(row, best=found.ranked[0], why="", efficiency=rate / first)
        rows.append(row)
    return rows


_IDEAL = {"color": "grey", "linestyle": "--", "linewidth": 0.8}
_STYLES = {"strong": ("tab:blue", "o", "same batch"), "weak": ("tab:orange", "s", "same samples a device")}


def draw_scaling(tables: Mapping[str, Sequence[ScalingRow]], path: Path, title: str) -> None:
    """Draws throughput and efficiency into a file; its ending (.png, .svg, .pdf) is its format.

    One row has a plan at least. The dashed line is the first point's throughput, device by device. Raises UsageError
    for other endings.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), dpi=110)
    throughput, efficiency = figure.subplots(1, 2)
    planned = {name: found for name, rows in tables.items() if (found := [row for row in rows if row.best])}
    counts = sorted({row.devices for rows in planned.values() for row in rows})
    rates, shares = [], [Line(counts, [100.0] * len(counts), look=_IDEAL)]
    for name, rows in planned.items():
        colour, marker, words = _STYLES[name]
        look = {"color": colour, "marker": marker}
        devices, tokens = [row.devices for row in rows], [row.best.tokens_per_s for row in rows if row.best]
        ideal = [tokens[0] / devices[0] * count for count in devices]
        rates += [
            Line(devices, tokens, f"{name}: {words}", look),
            Line(devices, ideal, look=_IDEAL | {"color": colour}),
        ]
        shares.append(Line(devices, [100 * row.efficiency for row in rows], look=look))
    draw_lines(throughput, rates, counts=counts, xlabel="GPUs", ylabel="predicted tokens/s")
    throughput.set_yscale("log", base=2)
    throughput.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value / 1000:,.0f} k")
    draw_lines(efficiency, shares, counts=counts, xlabel="GPUs", ylabel="predicted efficiency, %")
    efficiency.set_ylim(0, 105 * max(1.0, *(row.efficiency for rows in planned.values() for row in rows)))
    figure.suptitle(f"{title}: predicted, not measured", fontsize=10)
    save_picture(figure, path)
