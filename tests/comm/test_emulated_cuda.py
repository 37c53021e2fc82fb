"""Emulated links beside a real GPU: a collective takes the time that it should, also where the GPU is full."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch

from paceline.comm.base import Work
from paceline.comm.emulated.communicator import EmulatedWorld, Fabric

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def milliseconds(run: Callable[[], Work], beside: Callable[[], object]) -> list[float]:
    """Returns how long the device was at each of nine operations, with work ``beside`` them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(9):
            work = run()
            beside()
            work.wait()
            torch.cuda.synchronize()
    return [each.device_time / 1e3 for each in profile.events() if "hold_kernel" in each.name]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("is_full", [False, True], ids=["alone", "beside products"])
def test_a_collective_of_a_millisecond_takes_one(kind: str, is_full: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    comm = EmulatedWorld(8, Fabric(lambda *_: 1e-3, device, node_ranks=8)).rank(0)
    whole, piece = torch.ones(8 << 20, device=device), torch.ones(1 << 20, device=device)
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def run() -> Work:
        if kind == "all_reduce":
            return comm.all_reduce(whole)
        return comm.all_gather(whole, piece) if kind == "all_gather" else comm.reduce_scatter(piece, whole)

    def products() -> None:
        for _ in range(20 if is_full else 0):
            square @ square

    run().wait()
    products()
    torch.cuda.synchronize()
    assert median(milliseconds(run, products)) == pytest.approx(1.0, rel=0.03)
    assert whole.isfinite().all()


def test_gathers_copy_what_this_rank_has_and_numbers_are_those_of_equal_ranks() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    comm = EmulatedWorld(4, Fabric(lambda *_: 1e-4, device, node_ranks=4)).rank(1)
    own, whole = torch.randn(10_000, device=device), torch.empty(40_000, device=device)
    comm.all_gather(whole, own).wait()
    assert torch.equal(whole, own.repeat(4))
    odd, both = (
        torch.randn(9_999, device=device, dtype=torch.bfloat16),
        torch.empty(4 * 9_999, device=device, dtype=torch.bfloat16),
    )
    both.fill_(1.0)
    comm.all_gather(both, odd).wait()  # no whole number of words: its time is held, and nothing moves
    assert both.isfinite().all()
    number = torch.tensor([2.0], device=device)
    comm.all_reduce(number).wait()
    assert number.item() == 8.0
