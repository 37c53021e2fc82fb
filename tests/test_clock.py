"""Marks on a device's time line: ordered, additive, and cheap to ask; scalars that reach a device without a wait."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline import clock as clock_module
from paceline.clock import CudaMark, DeviceClock, on_device

CPU = torch.device("cpu")


def test_a_mark_of_the_host_is_past_when_it_is_taken() -> None:
    assert DeviceClock(CPU).mark().is_past()


def test_marks_tell_the_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(moments))
    clock = DeviceClock(CPU)
    first, second, third = clock.mark(), clock.mark(), clock.mark()
    assert second.seconds_since(first) == 2.5
    assert third.seconds_since(first) == third.seconds_since(second) + second.seconds_since(first)
    assert first.seconds_since(second) == -2.5
    assert first.seconds_since(first) == 0.0


def test_later_marks_are_not_before_earlier_ones() -> None:
    clock = DeviceClock(CPU)
    marks = [clock.mark() for _ in range(100)]
    assert all(later.seconds_since(earlier) >= 0 for earlier, later in itertools.pairwise(marks))


@pytest.mark.parametrize(
    "value",
    [2.5, torch.tensor(2.5), torch.tensor([[2.5]], dtype=torch.bfloat16), torch.tensor(2.5, requires_grad=True)],
)
def test_a_scalar_on_the_device_is_float64_and_detached(value: torch.Tensor | float) -> None:
    scalar = on_device(value, CPU)
    assert scalar.item() == 2.5
    assert (scalar.shape, scalar.dtype, scalar.requires_grad) == ((), torch.float64, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mark_on_cuda_is_an_event_in_the_order_of_the_work() -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    matrix = torch.randn(4096, 4096, device="cuda")
    first = clock.mark()
    for _ in range(50):
        matrix = matrix @ matrix * 1e-3
    second = clock.mark()
    assert isinstance(second, CudaMark)
    assert not second.is_past()
    assert second.seconds_since(first) > 0
    assert first.is_past()
    assert second.is_past()
