"""A rank's slice of a flat group: where it lies among the parameters, and how it gets to the host and back.

    flat      | weight ............ | pad | bias | pad | weight .......... | pad |
    slices    |  rank 0's slice  |  rank 1's slice  |  rank 2's slice  |

A cast or a copy is bound by memory, a matrix product by arithmetic: on CUDA the two run at the same time if they are on
different streams. What is issued on a side stream begins when the device has come so far; who needs the result waits
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, Work
from paceline.shards import FlatLayout, Region, Spans, flat_layout, memory_order, row_major

ALIGN = 32  # elements: keeps every view, and every slice, on a cache line, whatever the dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout(FlatLayout):
    """A flat layout of named parameters, this rank's slice, and in it a *piece* of each parameter, empty for some."""

    names: tuple[str, ...]
    start: int
    stop: int
    spans: Spans  # where in the slice each piece lies

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]], rank: int, num_ranks: int) -> ShardLayout:
        """Lays parameters out one after another, for ranks that get slices of one length."""
        shapes, strides = [tuple(p.shape) for _, p in named], [dense_stride(p) for _, p in named]
        flat = flat_layout(shapes, strides=strides, align=ALIGN, num_shards=ALIGN * num_ranks)
        start, stop = flat.shard_range(rank, num_ranks)
        ends = [(slot.offset, slot.offset + slot.numel) for slot in flat.slots]
        spans = tuple((min(max(a, start), stop) - start, min(max(b, start), stop) - start) for a, b in ends)
        names = tuple(name for name, _ in named)
        return cls(slots=flat.slots, length=flat.length, names=names, start=start, stop=stop, spans=spans)

    @property
    def shard_length(self) -> int:
        return self.stop - self.start

    def pieces(self, shard: Tensor) -> list[Tensor]:
        """Returns the pieces in this rank's slice of a buffer."""
        return [shard[begin:end] for begin, end in self.spans]

    def region(self, place: int) -> Region:
        """Returns which part of the n-th parameter its piece is."""
        slot, (begin, end) = self.slots[place], self.spans[place]
        first = min(max(self.start - slot.offset, 0), slot.numel)
        order = memory_order(slot.shape, slot.stride)
        return Region(shape=slot.shape, begin=first, end=first + end - begin, order=order)

    def cut_piece(self, place: int, whole: Tensor) -> Tensor:
        """Returns the n-th parameter's piece of a whole tensor, perhaps a view. Raises ValueError for another shape."""
        slot, (begin, end) = self.slots[place], self.spans[place]
        if tuple(whole.shape) != slot.shape:
            raise ValueError(f"{self.names[place]} has the shape {list(slot.shape)}, not {list(whole.shape)}")
        skip = max(self.start - slot.offset, 0)
        if whole.stride() != slot.stride:
            whole = whole.new_empty_strided(slot.shape, slot.stride).copy_(whole)
        return whole.as_strided((slot.numel,), (1,))[skip : skip + end - begin]


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole parameter of which this may be a piece."""
    return tuple(getattr(parameter, "full_shape", parameter.shape))


def dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides that a parameter has in a flat buffer: its own if they leave no holes and no overlap."""
    step = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != step:
            return row_major(parameter.shape)
        step *= size
    return parameter.stride() if 0 not in parameter.stride() else row_major(parameter.shape)


@dataclass(frozen=True, slots=True)
class _SideStreamPoint:
    """What was issued on a side stream up to a point."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Makes what the device computes from here on wait for it."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class SideStream:
    """Copies beside what the device computes, to the host or of another dtype; on a CPU everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._device = device

    def issue(self, work: Callable[[], Work]) -> Work:
        """Runs ``work`` from the point on that the device has come to; what it uses lives until it was waited for."""
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            inner = work()
            if inner is not DONE:
                return inner
            return _SideStreamPoint(self._stream.record_event(), self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
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


def host_empty(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a pinned host tensor, for copies that ``device`` need not wait for; on meta pinned too, to tell it."""
    if device.type == "meta":
        return torch.empty(length, dtype=dtype, device=device, pin_memory=True)
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")


class HostShard:
    """A rank's slice of a flat group that an optimizer updates on the host, and the way of its values to the device.

    master (as built, on the host)  --cast-->  staged (the parameters' dtype, pinned)  --copy-->  the device
    """

    def __init__(self, mine: Tensor, param_dtype: torch.dtype, *, stays_on_device: bool) -> None:
        """Copies this rank's slice to the host. ``stays_on_device``: a copy in the parameters' dtype stays there."""
        self._device = mine.device
        self.master = host_empty(mine.numel(), mine.dtype, mine.device).copy_(mine)
        self.resident: Tensor | None = None  # the slice on the device, another one after each update
        self.copies = SideStream(mine.device)
        self.seen_version = -1
        self._stays_on_device = stays_on_device
        is_cast = param_dtype != mine.dtype
        self._staged = host_empty(mine.numel(), param_dtype, mine.device) if is_cast else None

    def copy_to(self, mine: Tensor, *, may_have_changed: bool) -> Work:
        """Copies the values to the device. ``may_have_changed``: fused optimizers do not raise the version."""
        source = self.master.detach() if self._staged is None else self._staged
        if may_have_changed or self.seen_version != self.master._version:
            self.seen_version = self.master._version
            if self._staged is not None:
                self._staged.copy_(self.master.detach())
            if self._stays_on_device:
                self.resident = torch.empty_like(source, device=self._device).copy_(source, non_blocking=True)
        self.copies.copy(mine, source if self.resident is None else self.resident)
        return self.copies
