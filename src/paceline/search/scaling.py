"""How a model scales: the best plan for each number of devices, with the batch as it is (strong) or grown (weak).

efficiency = throughput a device / that of the smallest number that has a plan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cluster.devices import Cluster
from paceline.errors import UsageError
from paceline.predict.formulas.step import Prediction
from paceline.schedule.text import save_picture
from paceline.search.candidates import TrainingTask
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


def resized(cluster: Cluster, devices: int) -> Cluster:
    """Returns the cluster with another number of devices: a part of one node, or whole nodes."""
    each = cluster.node.devices
    if 1 <= devices <= each:
        return replace(
            cluster, name=f"{devices} of {cluster.node.name}", nodes=1, node=replace(cluster.node, devices=devices)
        )
    if devices < 1 or devices % each:
        near = [max(1, devices // each) * each, -(-max(devices, 1) // each) * each]
        raise UsageError(
            f"{devices} devices of {cluster.node.name}, which has {each}\n"
            "  beyond one node they are whole nodes, so that a mesh fits them\n"
            f"  try {' or '.join(str(count) for count in sorted(set(near)))}"
        )
    return replace(cluster, name=f"{devices // each}x {cluster.node.name}", nodes=devices // each)


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
    for name, rows in planned.items():
        colour, marker, words = _STYLES[name]
        devices, rates = [row.devices for row in rows], [row.best.tokens_per_s for row in rows if row.best]
        throughput.plot(devices, rates, color=colour, marker=marker, label=f"{name}: {words}")
        ends = (devices[0], devices[-1])
        throughput.plot(ends, [rates[0] / ends[0] * end for end in ends], color=colour, linestyle="--", linewidth=0.8)
        efficiency.plot(devices, [100 * row.efficiency for row in rows], color=colour, marker=marker, label=name)
    throughput.set_yscale("log", base=2)
    throughput.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value / 1000:,.0f} k")
    throughput.set_ylabel("predicted tokens/s")
    throughput.legend(fontsize=8, frameon=False)
    efficiency.axhline(100, color="grey", linestyle="--", linewidth=0.8)
    efficiency.set_ylim(0, 105 * max(1.0, *(row.efficiency for rows in planned.values() for row in rows)))
    efficiency.set_ylabel("predicted efficiency, %")
    counts = sorted({row.devices for rows in planned.values() for row in rows})
    for axes in (throughput, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}: predicted, not measured", fontsize=10)
    save_picture(figure, path)
