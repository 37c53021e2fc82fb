"""Kept figures of calibration: what follows from measurements that are made up, on a clock that steps move by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from kept_figures import assert_kept, told

from paceline.calibrate import kernels as measured_kernels
from paceline.calibrate import timing
from paceline.calibrate.entry import Refit, best_rates, make_entry, rescale, rounded, suggest_name
from paceline.calibrate.kernels import (
    FamilyFigures,
    KernelFigures,
    Shapes,
    measure_families,
    measure_kernels,
    shapes_for,
)
from paceline.calibrate.machine import (
    SIZES,
    LinkFigures,
    MachineFigures,
    RankFigures,
    Wanted,
    check_wanted,
    combine_ranks,
    fit_ring,
    median_figures,
    ring_seconds,
    with_more_ranks,
)
from paceline.calibrate.timing import LoopFigures, Stopwatch, check_quiet, figures_of, processor_share, summarize
from paceline.cluster.detect import Machine
from paceline.cluster.devices import ShapeRate
from paceline.units import GIB

HOST = Machine(processor="a processor", cores=4, memory_bytes=8.0 * GIB)
H100 = replace(HOST, gpus=("NVIDIA H100 80GB HBM3",) * 2, gpu_memory_bytes=(8e10,) * 2)
RATES = (
    ShapeRate(kind="matmul", dtype="fp32", sizes=(64, 64, 64), flops=1e10),
    ShapeRate(kind="matmul", dtype="fp32", sizes=(512, 512, 512), flops=5.00049e10, layout="nt"),
    ShapeRate(kind="matmul", dtype="bf16", sizes=(512, 512, 512), flops=7e14),
    ShapeRate(kind="attention", dtype="fp32", sizes=(1, 2, 64, 32), flops=2e10),
)
FAMILIES = FamilyFigures(
    rates={"norm": ((4096, 1.23456e9), (65536, 2e9))}, operation_s=5e-6, tensor_s=1.5e-7, step_s=2e-5, loop_s=3e-5
)
KERNELS = KernelFigures(
    rates=RATES, memory_bandwidth=1.2e10, launch_s=4e-6, compiled_launch_s=None, spreads={"memory": 0.02, "x": 0.3}
)
LINK = LinkFigures(
    latency_s=2e-5,
    bandwidth=3e9,
    worst=0.1,
    points=((4096, 1e-4),),
    spreads={"gloo 4 KiB": 0.1},
    by_ranks={2: ((4096, 1.234567e-4),)},
    busy=1.25,
)
ABOUT = {"torch": "x", "time": "now", "python": "3"}


def figures() -> dict[str, object]:
    parts = (_of_entries(), _of_fits(), _of_clocks(), _of_ranks(), _of_kernels())
    return {name: value for part in parts for name, value in part}


def test_calibration_gives_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _of_entries() -> Iterator[tuple[str, object]]:
    one = MachineFigures(device="cpu", ranks=1, threads=4, kernels=KERNELS, links={}, spread=0.0234567)
    many = replace(
        one, ranks=2, threads=2, links={"shared_memory": LINK, "loopback": replace(LINK, bandwidth=1e9)}, alone=one
    )
    full = replace(KERNELS, compiled_launch_s=2e-6, families=FAMILIES)
    gpu = replace(many, device="cuda", links={"nvlink": LINK}, kernels=replace(full, memory_bandwidth=3e12), alone=None)
    cases: list[tuple[str, Machine, MachineFigures, dict[str, Any]]] = [
        ("one", HOST, one, ABOUT),
        ("many", HOST, many, ABOUT),
        ("without time", HOST, replace(many, alone=None), {"torch": "x"}),
        ("families", HOST, replace(many, kernels=full), ABOUT),
        ("no loop", HOST, replace(one, kernels=replace(full, families=replace(FAMILIES, loop_s=None))), ABOUT),
        ("gpu", H100, gpu, ABOUT),
        ("slow gpu", H100, replace(gpu, kernels=replace(full, memory_bandwidth=9e12)), ABOUT),
        ("odd gpu", replace(H100, gpus=("Z9",)), gpu, ABOUT),
        ("no gpu", HOST, gpu, ABOUT),
    ]
    for name, machine, found, about in cases:
        suggested = suggest_name(machine, found)
        text = told(
            lambda machine=machine, found=found, about=about, suggested=suggested: make_entry(
                suggested, machine, found, "calibrate", about
            )
        )
        yield f"entry {name}", [suggested, text]
        if isinstance(text, str) and text.startswith("#"):
            for backend in ("gloo", "shared_memory"):
                yield f"rescaled {name} {backend}", rescale(text, 1.23456, 0.8, backend, "run")
    yield "sizes", [SIZES, Wanted().samples, timing.MOST_SPREAD, timing.LEAST_SHARE]
    yield "best", best_rates(RATES)
    yield "rounded", [rounded(value) for value in (1.23456, 123456.0, 0.000123456)]


def _of_fits() -> Iterator[tuple[str, object]]:
    for name, compute, communication, ranks, cores in (
        ("good", 1.0, 1.0, 2, 2),
        ("edges", 0.5, 4.0, 2, 2),
        ("slow", 2.1, 0.2, 4, 2),
        ("slow", 0.4, 1.0, 2, 2),
        ("no cores", 3.0, 5.0, 2, 0),
    ):
        fit = Refit(
            measured_s=2.0,
            before_s=1.5,
            after_s=2.5,
            compute=compute,
            communication=communication,
            text="",
            ranks=ranks,
            cores=cores,
        )
        yield f"fit {name} {compute}", [fit.to_json(), fit.error(3.0)]
    points = ((4096, 1e-4), (65536, 2e-4), (2**20, 2.5e-3))
    yield "ring", [list(fit_ring(points, ranks)) for ranks in (2, 3, 8)]
    yield (
        "no line",
        [
            list(fit_ring(each, 2))
            for each in (((4096, 1e-3), (65536, 1e-4)), ((4096, 1e-4),), ((1, 1e-4), (2**30, 1.0)))
        ],
    )
    yield "ring seconds", [ring_seconds(size, ranks, 1e-5, 1e9) for size in (0, 10**6) for ranks in (1, 2, 5)]


class _Clock:
    """Time that passes only where a step says so."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.busy

    def step(self, seconds: float, share: float = 1.0) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.busy += seconds * share

        return run


def _of_clocks() -> Iterator[tuple[str, object]]:
    for seconds in (1e-9, 1e-5, 3e-4, 0.01, 0.5, 3.0):
        clock, met = _Clock(), []
        with patch.object(
            timing, "time", SimpleNamespace(perf_counter=clock.perf_counter, thread_time=clock.thread_time)
        ):
            calls: list[int] = []
            step = clock.step(seconds)

            def counted(step: Callable[[], None] = step, calls: list[int] = calls) -> None:
                calls.append(1)
                step()

            watch = Stopwatch(samples=5, meet=lambda met=met: met.append(1), finish=clock.step(1e-6))
            alone = watch.time(counted, "alone")
            after = [len(calls), len(met)]
            together = watch.time_together(counted, 3, "together")
            after += [len(calls), len(met)]
            host = watch.time_host(counted)
            yield f"watch {seconds}", [alone, together, host, *after, len(calls), len(met), sorted(watch.spreads)]
    for share in (1.0, 0.4, 2.0):
        clock = _Clock()
        with patch.object(
            timing, "time", SimpleNamespace(perf_counter=clock.perf_counter, thread_time=clock.thread_time)
        ):
            yield f"share {share}", [processor_share(clock.step(0.07, share)), clock.now]
    yield "summaries", [list(summarize(each)) for each in ([2.0], [1.0, 3.0], [1.0, 2.0, 4.0, 8.0, 9.0])]
    spreads = {"a": 0.15, "b": 0.4, "c": 0.1, "d": 0.9}
    cases: tuple[tuple[dict[str, float], float], ...] = (
        ({}, 0.9),
        ({}, 0.89),
        ({"a": 0.15}, 0.9),
        ({"a": 0.16}, 1.0),
        (spreads, 1.0),
        (spreads, 0.5),
    )
    yield "quiet", [told(lambda each=each: check_quiet(*each)) for each in cases]
    pairs: tuple[tuple[tuple[int, float], tuple[int, float], float], ...] = (
        ((10, 1.0), (30, 2.0), 0.5),
        ((10, 2.0), (30, 1.0), -0.5),
        ((10, 1.0), (30, 9.0), 0.0),
        ((10, 1.0), (30, 3.0), 0.1),
    )
    yield "loops", [list(figures_of(few, many, loop_s=loop, spread=0.1)) for few, many, loop in pairs]


def _of_ranks() -> Iterator[tuple[str, object]]:
    other = replace(KERNELS, memory_bandwidth=2e10, launch_s=1e-6, spreads={"memory": 0.2, "x": 0.1}, families=FAMILIES)
    third = replace(KERNELS, memory_bandwidth=9e10, rates=tuple(replace(each, flops=3 * each.flops) for each in RATES))
    found = [
        RankFigures(share=share, kernels=each, links={"loopback": LINK})
        for share, each in ((1.0, KERNELS), (0.95, other), (0.99, third))
    ]
    yield "median", median_figures([KERNELS, other, third])
    wanted = Wanted(ranks=3)
    for name, ranks, asked in (
        ("three", found, wanted),
        ("noisy", [replace(each, share=0.5) for each in found], wanted),
        ("taken", [replace(each, share=0.5) for each in found], replace(wanted, accepts_noise=True)),
        ("nothing", [RankFigures(share=0.99)], wanted),
        ("little", [RankFigures(share=0.3)], wanted),
    ):
        result = told(lambda ranks=ranks, asked=asked: combine_ranks(ranks, asked, 2))
        yield (
            f"combined {name}",
            result if isinstance(result, str) else [result.spread, result.ranks, result.threads, sorted(result.links)],
        )
    more = with_more_ranks({"a": LINK, "b": LINK}, {"a": replace(LINK, by_ranks={4: ((1, 2.0),)})})
    yield "more", {name: {str(count): points for count, points in link.by_ranks.items()} for name, link in more.items()}
    with patch("paceline.calibrate.machine.usable_cores", lambda: (0, 1)):
        asked_for = (
            wanted,
            replace(wanted, ranks=2),
            replace(wanted, device="tpu"),
            replace(wanted, device="cuda", ranks=99),
        )
        yield "wanted", [str(told(lambda each=each: check_wanted(each))).partition(" GPUs")[0] for each in asked_for]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counting(Stopwatch):
    """Runs a step once, and says that it took a millisecond more than the one before."""

    def time(self, step: Callable[[], object], name: str = "") -> float:
        step()
        self.spreads[name or f"unnamed {len(self.spreads)}"] = 0.0
        return 1e-3 * len(self.spreads)

    def time_host(self, step: Callable[[], object], name: str = "") -> float:
        return _Counting.time(self, step, name)

    def time_together(self, step: Callable[[], object], repeats: int, name: str = "") -> float:
        return repeats * _Counting.time(self, step, name)


def _of_kernels() -> Iterator[tuple[str, object]]:
    """Rates by formula: of products, layers and attention in the time that a made-up watch tells."""
    shapes = Shapes(
        products={"fp32": ((4, 5, 6), (7, 8, 9)), "bf16": ((4, 4, 4),)},
        attention=((1, 2, 8, 4),),
        stream_bytes=4096,
        linears=((3, 4, 5),),
    )
    cpu = torch.device("cpu")
    found = measure_kernels(cpu, shapes, _Counting(), with_compiled=False)
    yield "kernels", [found, sorted(found.spreads)]
    with patch.object(
        measured_kernels, "measure_loop", lambda tensor_s, rounds: LoopFigures(tensor_s, rounds, 3.0, 0.5)
    ):
        families = measure_families(cpu, (4096, 16384), _Counting())
    known = ("pointwise", "curve", "reduction", "convert", "strided")
    yield (
        "families",
        [
            {name: families.rates[name] for name in known},
            families.tensor_s,
            families.operation_s,
            families.step_s,
            families.loop_s,
            sorted(families.spreads),
        ],
    )
    for kind in ("cpu", "all_cores", "cuda"):
        table = shapes_for(kind)
        yield f"shapes {kind}", replace(table, products={})
