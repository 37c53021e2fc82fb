"""Links as they are fitted: by all-reduces of which the test says how long they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.calibrate import machine
from paceline.calibrate.machine import Wanted, fit_ring, measure_link, ring_seconds
from paceline.errors import CommunicationError
from paceline.units import KIB, MIB

LATENCY, BANDWIDTH = 2e-5, 4e9


@dataclass
class Watch:
    """A stopwatch that knows what calls take: of a size, by the formula; of others, in turn."""

    ranks: int
    others: list[float] = field(default_factory=list)
    spreads: dict[str, float] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)

    def time_together(self, call: Any, repeats: int, name: str = "") -> float:
        call()
        self.asked.append((name, repeats))
        if not name:
            return self.others.pop(0)
        self.spreads[name] = 0.5
        return ring_seconds(int(name.split()[1]) * KIB, self.ranks, LATENCY, BANDWIDTH)


class Comm:
    """Ranks of which nobody waits for another."""

    device = torch.device("cpu")

    def __init__(self, size: int) -> None:
        self.size, self.reduced = size, []

    def all_reduce(self, tensor: torch.Tensor, how: str) -> Any:
        self.reduced.append((tensor.numel(), how))
        return SimpleNamespace(wait=lambda: self.reduced.append(("waited", how)))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_link_is_what_its_all_reduces_say(ranks: int) -> None:
    comm: Any = Comm(ranks)
    watch: Any = Watch(ranks, others=[0.5, 1.0, 1.375])
    sizes = (64 * KIB, 256 * KIB, 512 * KIB, 4 * MIB)
    found = measure_link(comm, sizes, watch, "gloo")
    assert (found.latency_s, found.bandwidth) == (pytest.approx(LATENCY), pytest.approx(BANDWIDTH))
    assert found.worst == pytest.approx(0.0, abs=1e-9)
    assert [size for size, _ in found.points] == list(sizes)
    assert found.by_ranks == {ranks: found.points}
    assert watch.asked[:4] == [("gloo 64 KiB", 10), ("gloo 256 KiB", 10), ("gloo 512 KiB", 2), ("gloo 4096 KiB", 2)]
    assert found.spreads.keys() == {name for name, _ in watch.asked[:4]}
    assert watch.spreads == {}  # those of another link stay as they are
    assert found.busy == pytest.approx(0.75)  # 0.375 s more than the products, of 0.5 s alone
    assert comm.reduced[0] == (16 * KIB, "sum")
    assert sum(each == ("waited", "sum") for each in comm.reduced) == 6


@pytest.mark.parametrize(("together", "busy"), [(1.0, machine._LEAST_BUSY), (99.0, machine._MOST_BUSY)])
def test_what_an_all_reduce_adds_to_products_has_bounds(together: float, busy: float) -> None:
    watch: Any = Watch(2, others=[0.5, 1.0, together])
    comm: Any = Comm(2)
    assert measure_link(comm, (64 * KIB, 4 * MIB), watch, "gloo").busy == busy


def test_a_ring_by_hand() -> None:
    assert ring_seconds(0, 4, 1.0, 1.0) == 6.0
    assert ring_seconds(8, 4, 0.0, 2.0) == 6.0
    assert ring_seconds(8, 2, 1.0, 4.0) == 4.0
    assert ring_seconds(8, 1, 1.0, 4.0) == 0.0
    latency, bandwidth = fit_ring([(8, 1.0)], 2)  # of one point: what it says alone
    assert (latency, bandwidth) == (0.5, 8.0)
    latency, bandwidth = fit_ring([(8, 2.0), (1000, 1.0)], 2)  # the larger one is quicker: no line
    assert (latency, bandwidth) == (0.5, 1000.0)


def test_shared_memory_that_is_not_there_leaves_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, ...]] = []

    def measure(_: Any, sizes: tuple[int, ...], __: Any, name: str) -> str:
        told.append(sizes)
        return name

    class Refused:
        @staticmethod
        def join(_: Any) -> Any:
            raise CommunicationError("too little of it")

    monkeypatch.setattr(machine, "measure_link", measure)
    comm: Any = SimpleNamespace(barrier=lambda: None)
    monkeypatch.setattr(machine, "SharedMemoryCommunicator", SimpleNamespace(join=lambda _: comm))
    wanted = Wanted(sizes=(KIB, machine._MOST_BYTES))
    assert machine._measure_links(comm, wanted) == {"shared_memory": "shared memory", "loopback": "gloo"}
    assert told == [(KIB, machine._MOST_BYTES)] * 2
    monkeypatch.setattr(machine, "SharedMemoryCommunicator", Refused)
    assert machine._measure_links(comm, wanted) == {"loopback": "gloo"}
