"""What a rank measures depends on its share of a processor: too little of it, and it stops, unless noise is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.calibrate import machine
from paceline.calibrate.kernels import KernelFigures
from paceline.calibrate.machine import RankFigures, Wanted, measure_rank
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual

KERNELS = KernelFigures(rates=(), memory_bandwidth=1e9, launch_s=1e-6, compiled_launch_s=None)


def measured(monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], **options: Any) -> list[RankFigures]:
    """What ranks find that have these shares of their processors; kernels and links take no time."""
    asked: list[bool] = []

    def of_rank(comm: Communicator) -> RankFigures:
        return measure_rank(comm, Wanted(ranks=len(shares), **options))

    def kernels(_device: torch.device, _shapes: Any, _watch: Any, *, with_compiled: bool) -> KernelFigures:
        asked.append(with_compiled)
        return KERNELS

    given = iter(shares)
    monkeypatch.setattr(machine, "processor_share", lambda _step: next(given))
    monkeypatch.setattr(machine, "measure_kernels", kernels)
    monkeypatch.setattr(machine, "_links", lambda *_: {"loopback": None})
    found = run_virtual(of_rank, len(shares))
    assert sum(asked) == (1 if asked else 0)  # one rank compiles
    return found


def test_ranks_agree_on_the_least_share(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, (0.95, 0.9, 1.0))
    assert [each.share for each in found] == pytest.approx([0.9] * 3)
    assert all(each.kernels is KERNELS and each.links for each in found)


def test_all_stop_where_one_has_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, (0.95, 0.5))
    assert [each.share for each in found] == pytest.approx([0.5] * 2)
    assert all(each.kernels is None and not each.links for each in found)


def test_noise_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, (0.95, 0.5), accepts_noise=True)
    assert all(each.kernels is KERNELS for each in found)


def test_one_rank_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = measured(monkeypatch, (1.0,))
    assert (found.share, found.links) == (1.0, {})
