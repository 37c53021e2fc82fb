"""How a model scales: the best plan for each number of devices, with the batch as it is (strong) or grown (weak).

efficiency = throughput a device / that of the smallest number that has a plan
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.cluster.devices import Cluster
from paceline.errors import UsageError
from paceline.search.candidates import TrainingTask
from paceline.search.search import Order, Ranked, search


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """The best plan for a number of devices; ``best`` is None where there is none, and ``why`` says so."""

    devices: int
    global_batch: int
    best: Ranked | None
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
    """Plans for each number of devices. Raises UsageError for a number that no equal nodes of this cluster have.

    Weak scaling keeps the samples of a device: the batch is the task's on the whole cluster, and in proportion else.
    """
    clusters = [resized(cluster, count) for count in sorted(set(counts))]
    rows = []
    for each in clusters:
        batch, rest = divmod(task.global_batch * each.devices, cluster.devices) if weak else (task.global_batch, 0)
        if rest or not batch:
            why = f"{task.global_batch} samples on {cluster.devices} devices are no whole number on {each.devices}"
            rows.append(ScalingRow(devices=each.devices, global_batch=batch, best=None, why=why))
        else:
            rows.append(_row(replace(task, global_batch=batch), each, order, host_memory))
    return list(_with_efficiency(rows))


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


def _row(task: TrainingTask, cluster: Cluster, order: Order, host_memory: float) -> ScalingRow:
    row = ScalingRow(devices=cluster.devices, global_batch=task.global_batch, best=None, why="out of memory")
    try:
        found = search(task, cluster, order=order, host_memory=host_memory)
    except UsageError as error:
        return replace(row, why=error.headline)
    return replace(row, best=found.ranked[0], why="") if found.ranked else row


def _with_efficiency(rows: Sequence[ScalingRow]) -> Iterator[ScalingRow]:
    first: float | None = None
    for row in rows:
        if row.best is None:
            yield row
            continue
        each = row.best.tokens_per_s / row.devices
        first = each if first is None else first
        yield replace(row, efficiency=each / first)
