"""Time on a device, read without stopping it.

A mark on a CPU is the time now. A mark on CUDA is an event in the current stream: it costs microseconds to set, and its
time is asked for later, when the device has passed it anyway. So a step's phases are timed without a synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


def on_device(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Returns a float64 scalar on ``device``; a plain number is filled in there, since a copy would wait for it."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True)
    return torch.full((), float(value), dtype=torch.float64, device=device)


class Mark(Protocol):
    """A moment on a device's own time line."""

    def is_past(self) -> bool:
        """Says whether the device has come by this moment."""

    def seconds_since(self, earlier: Mark) -> float:
        """Returns the time between two marks of one clock; waits for the device if it is not past them."""


class HostMark(float):
    """A moment of the host, which is past as soon as it is taken. A float, because it is taken many times a step."""

    __slots__ = ()

    def is_past(self) -> bool:
        return True

    def seconds_since(self, earlier: Mark) -> float:
        return self - earlier  # type: ignore[operator]


class CudaMark:
    """An event in the current stream of a CUDA device."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def is_past(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        """Returns the device time in between; waits for the later event."""
        assert isinstance(earlier, CudaMark)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def seconds_between(start: Mark | float, end: Mark | float) -> float:
    """Returns the time between two marks of one clock, bare host times among them."""
    return end - start if isinstance(end, float) else end.seconds_since(start)  # type: ignore[operator, arg-type]


class Clock(Protocol):
    """What takes marks: a device's own time, or a virtual rank's."""

    @property
    def take(self) -> Callable[[], Mark | float]: ...  # perhaps a bare number

    def mark(self) -> Mark: ...


class DeviceClock:
    """Takes marks on one device; ``take`` is ``mark`` for inner loops: on a CPU a bare number, and one call less."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self.take: Callable[[], Mark | float] = CudaMark if self._is_cuda else time.perf_counter

    def mark(self) -> Mark:
        """Takes a mark now, in the order of the work issued so far."""
        return CudaMark() if self._is_cuda else HostMark(time.perf_counter())
