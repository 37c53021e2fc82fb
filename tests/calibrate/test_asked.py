"""What a calibration asks of ranks: how many processes, with how many threads, and which of them alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.calibrate import machine
from paceline.calibrate.kernels import KernelFigures, Shapes, shapes_for
from paceline.calibrate.machine import LinkFigures, RankFigures, Wanted, combine_ranks, measure_machine
from paceline.errors import UsageError

KERNELS = KernelFigures(
    memory_bandwidth=1e9, launch_s=1e-5, compiled_launch_s=None, rates=(), spreads={"memory": 0.01, "launches": 0.03}
)
LINK = LinkFigures(latency_s=1e-5, bandwidth=1e9, worst=0.0, points=(), spreads={"ring": 0.02}, by_ranks={2: ()})
SMALL = Shapes(products={"fp32": ((8, 8, 8),)}, attention=(), stream_bytes=4096, linears=())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, Wanted]]:
    """Takes down what processes are asked for, on a host with eight cores."""
    calls: list[tuple[str, int, int, Wanted]] = []

    def run_processes(work: Any, ranks: int, *, args: tuple[Wanted], threads: int, timeout_s: float) -> list[Any]:
        assert timeout_s > 60
        calls.append((work.__name__, ranks, threads, args[0]))
        if work is machine.measure_rank:
            return [RankFigures(share=1.0, kernels=KERNELS, links={"loopback": LINK})] * ranks
        return [{"loopback": replace(LINK, by_ranks={ranks: ()})}] * ranks

    monkeypatch.setattr(machine, "run_processes", run_processes)
    monkeypatch.setattr(machine, "usable_cores", lambda: set(range(8)))
    return calls


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(), [("measure_rank", 1, 8)]),
        (Wanted(alone=True), [("measure_rank", 1, 8)]),
        (Wanted(ranks=3), [("measure_rank", 3, 2)]),
        (Wanted(ranks=3, alone=True), [("measure_rank", 3, 2), ("measure_rank", 1, 8)]),
        (Wanted(ranks=8, alone=True), [("measure_rank", 8, 1), ("measure_rank", 1, 8)]),
        (Wanted(ranks=9, alone=True, accepts_noise=True), [("measure_rank", 9, 1)]),
        (
            Wanted(ranks=2, more_ranks=(4, 16)),
            [("measure_rank", 2, 4), ("_measure_links", 4, 1), ("_measure_links", 16, 1)],
        ),
    ],
)
def test_ranks_share_the_cores_and_one_alone_has_all(
    wanted: Wanted, expected: list[tuple[str, int, int]], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "check_wanted", lambda _: None)
    found = measure_machine(wanted)
    assert [call[:3] for call in asked] == expected
    sizes = {name: call.sizes for name, *_, call in asked}  # of ranks that take turns no large ones, which take long
    assert max(sizes["measure_rank"]) > machine._MOST_BYTES >= max(sizes.get("_measure_links", (0,)))
    assert (found.device, found.ranks, found.threads) == ("cpu", wanted.ranks, expected[0][2])
    assert found.spread == pytest.approx(0.02)
    is_alone = expected[-1][0] == "measure_rank" and len(expected) > 1
    assert (found.alone is not None) == is_alone
    assert list(found.links["loopback"].by_ranks) == [2, *wanted.more_ranks]
    if found.alone is not None:
        assert (found.alone.ranks, found.alone.threads, found.alone.alone) == (1, 8, None)
        last = asked[-1][3]
        assert (last.ranks, last.with_compiled, last.shapes) == (1, False, shapes_for("all_cores"))


def test_ranks_on_gpus_have_one_thread_each_and_none_is_alone(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "check_wanted", lambda _: None)
    found = measure_machine(Wanted(device="cuda", ranks=2, alone=True))
    assert ([call[:3] for call in asked], found.alone) == ([("measure_rank", 2, 1)], None)


def test_shapes_of_one_s_own_are_measured_alone_too(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "check_wanted", lambda _: None)
    measure_machine(Wanted(ranks=2, alone=True, shapes=SMALL))
    assert asked[-1][3].shapes == SMALL


def test_ranks_that_had_too_little_of_a_processor_are_refused() -> None:
    little = RankFigures(share=0.1)
    with pytest.raises(UsageError):
        combine_ranks([little, little], Wanted(ranks=2), threads=1)
    with pytest.raises(UsageError, match="no rank measured anything"):
        combine_ranks([RankFigures(share=1.0)], Wanted(), threads=1)
    kept = combine_ranks([replace(little, kernels=KERNELS)], Wanted(accepts_noise=True), threads=3)
    assert (kept.threads, kept.spread, kept.kernels) == (3, pytest.approx(0.02), KERNELS)
