"""Work that runs beside what the device computes.

A cast or a copy is bound by memory, a matrix product by arithmetic: on CUDA the two run at the same time if they are on
different streams. What is issued on a side stream begins when the device has come so far; who needs the result waits
for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.base import DONE, Work


class _SideStreamPoint:
    """What was issued on a side stream up to a point."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Makes what the device computes from here on wait for it."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class SideStream:
    """Copies beside what the device computes, to the host or of another dtype; on a CPU everything runs in order.

    A copy begins when the device has come so far as it was issued; ``wait`` makes later work on the device wait for it,
    and ``finish`` the host.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._device = device

    def issue(self, work: Callable[[], Work]) -> Work:
        """Runs ``work`` on the stream, from the point on that the device has come to; returns what to wait for.

        What it reads and writes must stay alive until it was waited for.
        """
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            inner = work()
            if inner is not DONE:
                return inner
            return _SideStreamPoint(self._stream.record_event(), self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy. The host's side is pinned; the device's is kept until the copy has ended."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Makes what the device computes from here on wait for the copies: a side stream is a ``Work``."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Makes the host wait for the copies. A sync point."""
        if self._stream is not None:
            self._stream.synchronize()


def host_empty(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Makes a host tensor that ``device`` can copy from and to without waiting: pinned where that is CUDA.

    A dry run has no values on the host either; that the memory would be pinned tells it from a device's.
    """
    if device.type == "meta":
        return torch.empty(length, dtype=dtype, device=device, pin_memory=True)
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")
