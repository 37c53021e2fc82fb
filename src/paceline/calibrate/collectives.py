"""Measures all-reduces among the ranks of this host, and fits a ring to them.

For B bytes on n ranks a ring takes 2 (n-1) (a + B / (n b)): a seconds a hop, b bytes per second. Both come from a least
squares fit of the times relative to what was measured, so that small messages count as much as large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from paceline.calibrate.sampling import Stopwatch
from paceline.comm.base import Communicator
from paceline.units import KIB, MIB

_BUSY_BYTES = 4 * MIB
_BUSY_PRODUCTS = 12
_LEAST_BUSY, _MOST_BUSY = 0.05, 1.5  # beyond is noise: it costs what it takes, and a little of the caches
SIZES = (4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """A fitted link: seconds of a hop, bytes per second of a ring; and how far the fit is off at worst."""

    latency_s: float
    bandwidth: float
    worst: float
    points: tuple[tuple[int, float], ...]
    spreads: dict[str, float]
    by_ranks: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    busy: float = 1.0


def measure_link(comm: Communicator, sizes: Sequence[int], watch: Stopwatch, name: str) -> LinkFigures:
    """Times all-reduces of float32 by the communicator's own algorithm; all ranks call this together."""
    watch, points = replace(watch, spreads={}), []
    for size in sizes:
        tensor = torch.zeros(size // 4, device=comm.device)
        repeats = 10 if size <= 256 * KIB else 2
        call = partial(_all_reduce, comm, tensor)
        points.append((size, watch.time_together(call, repeats, f"{name} {size // KIB} KiB")))
    latency, bandwidth = fit_ring(points, comm.size)
    worst = max(abs(ring_seconds(size, comm.size, latency, bandwidth) / took - 1) for size, took in points)
    return LinkFigures(
        latency_s=latency,
        bandwidth=bandwidth,
        worst=worst,
        points=tuple(points),
        spreads=watch.spreads,
        by_ranks={comm.size: tuple(points)},
        busy=_busy(comm, watch),
    )


def _all_reduce(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.all_reduce(tensor, "sum").wait()


def _busy(comm: Communicator, watch: Stopwatch) -> float:
    """Returns what an all-reduce adds to products that run beside it, over what it takes alone.

    1 on a GPU, where runs measure it.

    On a CPU the transfer takes a core's time, its caches and its memory from the products: less than nothing of it is
    hidden where a second core is not free.
    """
    if comm.device.type != "cpu":
        return 1.0
    tensor, left = torch.zeros(_BUSY_BYTES // 4), torch.randn(512, 512)

    def compute() -> None:
        for _ in range(_BUSY_PRODUCTS):
            torch.mm(left, left)

    def both() -> None:
        handle = comm.all_reduce(tensor, "sum")
        compute()
        handle.wait()

    alone = watch.time_together(partial(_all_reduce, comm, tensor), 2)
    products, together = watch.time_together(compute, 1), watch.time_together(both, 1)
    return min(_MOST_BUSY, max(_LEAST_BUSY, (together - products) / alone))


def ring_seconds(num_bytes: float, ranks: int, latency_s: float, bandwidth: float) -> float:
    """Returns what a ring takes for an all-reduce."""
    return 2 * (ranks - 1) * (latency_s + num_bytes / (ranks * bandwidth))


def fit_ring(points: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """Returns seconds of a hop and bytes per second that fit best, relative to the times; neither below a floor."""
    hops = 2 * (ranks - 1)
    # Minimise the sum of (x u + y v - 1)^2, where x = hops / t, y = hops B / (n t), u = latency, v = 1 / bandwidth.
    rows = [(hops / took, hops * size / (ranks * took)) for size, took in points]
    xx, xy, yy = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    x, y = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = xx * yy - xy * xy
    latency = (x * yy - y * xy) / determinant if determinant > 0 else 0.0
    inverse = (y * xx - x * xy) / determinant if determinant > 0 else 0.0
    if latency <= 0 or inverse <= 0:  # not a line: what the ends say alone
        latency = min(took for _, took in points) / hops
        size, took = max(points)
        inverse = ranks * took / (hops * size)
    return max(latency, 1e-9), 1 / inverse
