"""Measures this machine as a node: so many ranks that compute at once, each with its share of the cores or its GPU.

Ranks measure together, as they compute together in a run; the median of them is written down. To all-reduces among
them a ring is fitted: for B bytes on n ranks it takes 2 (n-1) (a + B / (n b)), a seconds a hop, b bytes per second, by
least squares of times relative to what was measured, so that small messages count as much as large ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.calibrate.kernels import KernelFigures, Shapes, measure_kernels, shapes_for
from paceline.calibrate.timing import LEAST_SHARE, Stopwatch, check_quiet, processor_share
from paceline.cluster.detect import usable_cores
from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.comm.torch_dist import connect, disconnect
from paceline.errors import CommunicationError, UsageError
from paceline.run.function_ranks import run_processes
from paceline.units import KIB, MIB

_TIMEOUT_S = 600.0
_GPU_SAMPLE_S = 0.01
_MOST_BYTES = 16 * MIB  # among ranks that take turns, which take long for more
_BUSY_BYTES = 4 * MIB
_BUSY_PRODUCTS = 12
_LEAST_BUSY, _MOST_BUSY = 0.05, 1.5  # beyond is noise: it costs what it takes, and a little of the caches
SIZES = (4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure: on ``cpu`` or ``cuda``, with so many ranks; None for a device's usual shapes and sizes.

    ``more_ranks``: all-reduces among as many CPU ranks besides, though they take turns on the cores. ``alone``: the
    kernels of one CPU rank besides that has all cores, where there are several ranks.
    """

    device: str = "cpu"
    ranks: int = 1
    with_compiled: bool = True
    samples: int = 9
    shapes: Shapes | None = None
    sizes: tuple[int, ...] = SIZES
    accepts_noise: bool = False
    more_ranks: tuple[int, ...] = ()
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFigures:
    """What came out: the median rank's kernels, links by kind; ``alone``: of one rank that had the threads of all."""

    device: str
    ranks: int
    threads: int
    kernels: KernelFigures
    links: dict[str, LinkFigures]
    spread: float
    alone: MachineFigures | None = None


def measure_machine(wanted: Wanted) -> MachineFigures:
    """Measures this machine. Raises UsageError where it is plainly noisy, with the spread, unless that is taken."""
    check_wanted(wanted)
    threads = max(1, len(usable_cores()) // wanted.ranks) if wanted.device == "cpu" else 1
    found = run_processes(measure_rank, wanted.ranks, args=(wanted,), threads=threads, timeout_s=_TIMEOUT_S)
    measured = combine_ranks(found, wanted, threads)
    for count in wanted.more_ranks:
        few = replace(wanted, sizes=tuple(size for size in wanted.sizes if size <= _MOST_BYTES))
        links = run_processes(_measure_links, count, args=(few,), threads=1, timeout_s=_TIMEOUT_S)[0]
        measured = replace(measured, links=with_more_ranks(measured.links, links))
    if wanted.alone and wanted.device == "cpu" and 1 < wanted.ranks <= len(usable_cores()):
        one = replace(wanted, ranks=1, shapes=wanted.shapes or shapes_for("all_cores"), with_compiled=False)
        found = run_processes(measure_rank, 1, args=(one,), threads=len(usable_cores()), timeout_s=_TIMEOUT_S)
        measured = replace(measured, alone=combine_ranks(found, one, len(usable_cores())))
    return measured


def with_more_ranks(links: dict[str, LinkFigures], more: dict[str, LinkFigures]) -> dict[str, LinkFigures]:
    """Adds to links what they took among other numbers of ranks."""
    return {
        kind: replace(link, by_ranks=link.by_ranks | more[kind].by_ranks) if kind in more else link
        for kind, link in links.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What one rank found: the least share of a processor any rank had; and the rest, unless that is too little."""

    share: float
    kernels: KernelFigures | None = None
    links: dict[str, LinkFigures] = field(default_factory=dict)


def combine_ranks(found: Sequence[RankFigures], wanted: Wanted, threads: int) -> MachineFigures:
    """Combines what all ranks measured. Raises UsageError where that is plainly noise, unless noise is taken."""
    share = min(each.share for each in found)
    by_rank = [each.kernels for each in found if each.kernels is not None]
    if not by_rank:
        check_quiet({}, share)
        raise UsageError("no rank measured anything\n  at least one does\n  try again")
    kernels, links = median_figures(by_rank), found[0].links
    spreads = dict(kernels.spreads)
    for link in links.values():
        spreads |= link.spreads
    if not wanted.accepts_noise:
        check_quiet(spreads, share)
    spread = statistics.median(spreads.values())
    return MachineFigures(
        device=wanted.device, ranks=wanted.ranks, threads=threads, kernels=kernels, links=links, spread=spread
    )


def median_figures(found: Sequence[KernelFigures]) -> KernelFigures:
    """Returns the median rank's figures, and the worst spreads of all."""
    worst = {name: max(each.spreads[name] for each in found) for name in found[0].spreads}
    middle: KernelFigures = _median(found)
    return replace(middle, spreads=worst)


def _median(found: Iterable[Any]) -> Any:
    """Returns the medians of numbers, also of those in records and tables; what no rank has (None) stays None."""
    known = [each for each in found if each is not None]
    first = known[0] if known else None
    if isinstance(first, float):
        return statistics.median(known)
    if isinstance(first, tuple):
        return tuple(map(_median, zip(*known, strict=True)))
    if isinstance(first, Mapping):
        return {key: _median([each[key] for each in known]) for key in first}
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{x.name: _median([getattr(each, x.name) for each in known]) for x in fields(first)})
    return first  # a name or a size, the same on all ranks


def check_wanted(wanted: Wanted) -> None:
    """Raises UsageError for what cannot be measured here."""
    if wanted.device not in ("cpu", "cuda"):
        raise UsageError(f"--device {wanted.device}: a device is cpu or cuda\n  take one of them")
    if wanted.device == "cuda" and wanted.ranks > torch.cuda.device_count():
        raise UsageError(
            f"{wanted.ranks} ranks on {torch.cuda.device_count()} GPUs that torch reaches\n  each rank has one of its "
            "own\n  see paceline doctor, or measure with fewer --ranks, or --device cpu"
        )
    cores = len(usable_cores())
    if wanted.device == "cpu" and wanted.ranks > cores:
        raise UsageError(f"{wanted.ranks} ranks on {cores} cores\n  each has one at least\n  take --ranks {cores}")


def measure_rank(comm: Communicator, wanted: Wanted) -> RankFigures:
    """Measures kernels and links on one of the ranks that do so together, unless others use its processor."""
    is_cuda = wanted.device == "cuda"
    device = torch.device("cuda", comm.rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    share = _least_share(comm)
    if share < LEAST_SHARE and not wanted.accepts_noise:
        return RankFigures(share=share)
    watch = Stopwatch(samples=wanted.samples, meet=comm.barrier)
    if is_cuda:
        watch = replace(watch, finish=torch.cuda.synchronize, shortest_s=_GPU_SAMPLE_S)
    shapes = wanted.shapes or shapes_for("cuda" if is_cuda else "cpu")
    kernels = measure_kernels(device, shapes, watch, with_compiled=wanted.with_compiled and comm.rank == 0)
    comm.barrier()
    links = _links(comm, device, wanted, watch) if comm.size > 1 else {}
    return RankFigures(share=share, kernels=kernels, links=links)


def _measure_links(comm: Communicator, wanted: Wanted) -> dict[str, LinkFigures]:
    """Measures all-reduces of CPU ranks alone."""
    return _links(comm, torch.device("cpu"), wanted, Stopwatch(samples=wanted.samples, meet=comm.barrier))


def measure_sizes(wanted: Wanted) -> dict[str, tuple[tuple[int, float], ...]]:
    """Times all-reduces of CPU ranks; returns bytes and seconds by kind of link."""
    return {kind: link.points for kind, link in run_processes(_measure_links, wanted.ranks, args=(wanted,))[0].items()}


def _least_share(comm: Communicator) -> float:
    """Returns the least share of a processor that any rank had while all worked: ranks agree on whether to go on."""
    small = torch.randn(96, 96)  # small enough to stay on one thread
    comm.barrier()
    lost = torch.tensor([1.0 - processor_share(lambda: small @ small)], dtype=torch.float64)
    comm.all_reduce(lost, "max").wait()
    return 1.0 - float(lost.item())


def _links(comm: Communicator, device: torch.device, wanted: Wanted, watch: Stopwatch) -> dict[str, LinkFigures]:
    if device.type == "cuda":
        disconnect()
        over = connect("nccl", device=device)
        watch = Stopwatch(samples=watch.samples, meet=over.barrier, finish=watch.finish)
        return {"nvlink": measure_link(over, wanted.sizes, watch, "nccl")}
    found = {}
    with suppress(CommunicationError):  # too little of it on this host, on all ranks alike
        shared = SharedMemoryCommunicator.join(comm)
        found["shared_memory"] = measure_link(shared, wanted.sizes, watch, "shared memory")
    found["loopback"] = measure_link(comm, wanted.sizes, watch, "gloo")
    return found


# Links.


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
    """Returns what an all-reduce adds to products that run beside it, over what it takes alone; 1 on a GPU.

    On a CPU the transfer takes a core's time, its caches and its memory from the products.
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
