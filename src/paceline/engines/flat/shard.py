"""A rank's slice of a flat group: where it lies, how it gets to the host and back, and its gradients.

    flat        | weight ............ | pad | bias | pad | weight .......... | pad |
    slices      |  rank 0's slice  |  rank 1's slice  |  rank 2's slice  |
    gradients   of parameters  --copy in, times the scale-->  whole buffer  --reduce-scatter-->  slice: of pieces

A cast or a copy is bound by memory, a matrix product by arithmetic: on CUDA the two run at the same time if they are on
different streams. What is issued on a side stream begins when the device has come so far; who needs it waits for it.

The optimizer sees gradients as views into the slice, and may take them away: so what they were made of is compared
before it is used again. Their one true norm is a sum over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, BucketReduction, Communicator, Work
from paceline.engines.groups import reduction
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
        self._staged = host_empty(mine.numel(), param_dtype, mine.device) if param_dtype != mine.dtype else None

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


_DOTTED = (torch.float32, torch.float64)  # sums of squares in other dtypes would overflow, or lose too much


@dataclass(slots=True, eq=False)
class ShardGradients:
    """Gradients of parameters that are reduced together, and those of this rank's pieces."""

    layout: ShardLayout
    comm: Communicator
    pieces: Sequence[nn.Parameter]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    side_stream: SideStream  # beside nothing, until an engine says otherwise
    host_copies: SideStream | None  # the slice lives on the host, where these bring it
    stashes: bool  # sums of earlier microbatches are on the host
    slice: Tensor | None = None  # the pieces' gradients are views into it
    stashed: Tensor | None = None
    compressed: BucketReduction | None = None  # what averages slices over replicas, in place of an all-reduce
    _views: list[Tensor] = field(default_factory=list)
    _has_arrived: bool = False  # since it was last asked for
    _norms: tuple[int, Sequence[Tensor], Work] | None = None  # of which version of the slice

    @property
    def is_cleared(self) -> bool:
        return all(piece.grad is None for piece in self.pieces)

    def new_buffer(self) -> Tensor:
        """Makes the flat buffer that gradients are copied into; nobody reads its padding."""
        return torch.empty(self.layout.length, dtype=self.reduce_dtype, device=self.comm.device)

    def copy_in(self, buffer: Tensor, taken: list[Tensor | None], scale: float) -> None:
        """Copies gradients times ``scale`` into a buffer, zeros for those that are missing.

        On a CPU each is freed when it is in; elsewhere the caller keeps ``taken`` until the device has read it.
        """
        views, sources = [], []
        for place, (source, slot) in enumerate(zip(taken, self.layout.slots, strict=True)):
            view = slot.view(buffer)
            if source is None:
                view.zero_()
                continue
            views.append(view)
            sources.append(source)
            if buffer.device.type == "cpu":
                taken[place] = None
        if views and scale != 1.0 and sources[0].dtype == buffer.dtype:
            while sources:  # one pass over each, which is freed before the next
                torch.mul(sources.pop(), scale, out=views.pop())
        elif views:
            torch._foreach_copy_(views, sources)
            if scale != 1.0:
                torch._foreach_mul_(views, scale)

    def new_slice(self) -> Tensor:
        """Returns where a reduce-scatter puts this rank's slice: the one there is, if no piece has a gradient in it."""
        is_plain = self.reduce_dtype == self.dtype and self.host_copies is None
        if self.slice is not None and is_plain and self.is_cleared:
            return self.slice
        return torch.empty(self.layout.shard_length, dtype=self.reduce_dtype, device=self.comm.device)

    def reduce_scatter(self, buffer: Tensor, output: Tensor | None = None) -> tuple[Tensor, Work]:
        """Averages the gradients of all ranks; returns this rank's slice, in ``output`` or ``buffer``, and the work."""
        mine = buffer[self.layout.start : self.layout.stop] if output is None else output
        if self.comm.size == 1:
            if output is not None:
                mine.copy_(buffer)
            return mine, DONE
        return mine, self.comm.reduce_scatter(mine, buffer, reduction(self.comm))

    def add(self, mine: Tensor, *, is_last: bool = True) -> None:
        """Makes a reduced slice the pieces' gradient, or adds it to the one they have.

        It may still be on its way to the host, where offloaded gradients of all microbatches but the last add up.
        """
        self._has_arrived = True
        if self.stashes:
            if not is_last:
                if self.stashed is None:
                    self.stashed = host_empty(mine.numel(), mine.dtype, self.comm.device).copy_(mine)
                else:
                    self.stashed += mine.to(self.stashed.device)
                return
            if self.stashed is not None:
                mine = mine + self.stashed.to(mine.device, non_blocking=True)
                self.stashed = None
        if not self.is_cleared:
            self._add(mine)
        elif self.host_copies is None:
            if mine is not self.slice:
                self._keep(mine.to(self.dtype))
        else:
            if self.slice is None:
                self._keep(host_empty(mine.numel(), self.dtype, self.comm.device))
            self.host_copies.copy(cast("Tensor", self.slice), mine.to(self.dtype))
        for piece, view in zip(self.pieces, self._views, strict=True):
            piece.grad = view

    def take_arrived(self) -> bool:
        """Says whether gradients came since the last call, so that an optimizer may have stepped."""
        arrived, self._has_arrived = self._has_arrived, not self.is_cleared
        return arrived

    def finish(self) -> None:
        """Waits for the slice to be on the host, if that is where it goes."""
        if self.host_copies is not None:
            self.host_copies.finish()

    def drop(self) -> None:
        """Frees the slice once the pieces have no gradient. A CPU keeps the memory: to get it anew costs more."""
        if self.comm.device_kind != "cpu" and self.host_copies is None and self.is_cleared:
            self.slice, self._views = None, []

    def _add(self, mine: Tensor) -> None:
        if self.slice is None:  # the loss has a term of the pieces themselves, whose gradients came first
            on_host = None if self.host_copies is None else host_empty(mine.numel(), self.dtype, self.comm.device)
            self._keep(torch.zeros_like(mine, dtype=self.dtype) if on_host is None else on_host.zero_())
        assert self.slice is not None
        self.finish()
        if mine is self.slice:  # reduced into place, and such gradients came meanwhile
            for piece, view in zip(self.pieces, self._views, strict=True):
                if piece.grad is not None and piece.grad.data_ptr() != view.data_ptr():
                    view += piece.grad
            return
        for piece, view in zip(self.pieces, self._views, strict=True):
            if piece.grad is None:
                view.zero_()
            elif piece.grad.data_ptr() != view.data_ptr():  # the user has put another one there
                view.copy_(piece.grad)
        self.slice += mine.to(self.slice.device, self.slice.dtype)

    def _keep(self, gradient: Tensor) -> None:
        self.slice, self._views = gradient, self.layout.pieces(gradient)

    @torch.no_grad()
    def measure(self) -> None:
        """Takes the norms of the pieces' gradients, beside what the device computes; on a CPU one norm of all."""
        mine, views = self.slice, self._views
        if mine is None or self.host_copies is not None:
            return
        norms: list[Tensor] = []
        spans = self.layout.spans
        begin, end = min(first for first, _ in spans), max(last for _, last in spans)
        has_gaps = sum(last - first for first, last in spans) != end - begin  # whose numbers are no one's
        is_one = self.comm.device_kind == "cpu" and not has_gaps and mine.dtype in _DOTTED

        def take() -> Work:
            norms[:] = [torch.dot(mine[begin:end], mine[begin:end]).sqrt_()] if is_one else torch._foreach_norm(views)
            return DONE

        self._norms = (mine._version, norms, self.side_stream.issue(take))

    def take_norms(self) -> Sequence[Tensor] | None:
        """Returns the norms that ``measure`` took, once, if the gradients are still the same ones."""
        taken, self._norms = self._norms, None
        if taken is None or not self.is_of_version(taken[0]):
            return None
        taken[2].wait()
        if len(taken[1]) != len(self.pieces):  # one norm of all
            return None if any(piece.grad is None for piece in self.pieces) else taken[1]
        return [norm for norm, piece in zip(taken[1], self.pieces, strict=True) if piece.grad is not None]

    @property
    def version(self) -> int:
        return -1 if self.slice is None else self.slice._version

    def is_of_version(self, version: int) -> bool:
        """Says whether the slice is as it was then, and all that pieces have of gradients lies in it."""
        if self.slice is None or self.slice._version != version:
            return False
        return all(p.grad is None or p.grad is view for p, view in zip(self.pieces, self._views, strict=True))


@torch.no_grad()
def clip_pieces(
    pieces: Sequence[nn.Parameter],
    comm: Communicator,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    norms: Sequence[Tensor] | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Clips gradients of which every rank of ``comm`` has pieces; returns their global norm.

    One all-reduce. The coefficient stays on the device: nothing waits for it. ``norms`` are those of the pieces, and
    ``squares`` the sum of all ranks', where these are known already.
    """
    gradients = [piece.grad for piece in pieces if piece.grad is not None and piece.grad.numel()]
    if squares is not None:
        norm = squares.sqrt()
    else:
        if norms is None:
            norms = torch._foreach_norm(gradients, norm_type) if gradients else []
        if norms:
            stacked = torch.stack(list(norms)).to(comm.device)
            local = torch.dot(stacked, stacked) if norm_type == 2.0 else add_powers(stacked, norm_type)
        else:
            local = torch.zeros((), dtype=pieces[0].dtype if pieces else torch.float32, device=comm.device)
        norm = reduce_norm(local, comm, norm_type)
    scale_to(max_norm, norm, gradients)
    return norm


def scale_to(max_norm: float, norm: Tensor, gradients: list[Tensor]) -> None:
    """Scales gradients of this global norm so that it is at most ``max_norm``, which may be infinite."""
    if not math.isinf(max_norm) and gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0]))


def add_powers(norms: Tensor, norm_type: float) -> Tensor:
    """Returns the sum of powers of norms, or the largest of them for the infinite norm."""
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def reduce_norm(local: Tensor, comm: Communicator, norm_type: float) -> Tensor:
    """Returns the global norm, from each rank's sum of powers of the norms of its gradients, or the largest norm."""
    total, is_max = local.reshape(1), math.isinf(norm_type)
    if is_max:  # the larger of a number and nan is the number, to some backends
        total.masked_fill_(total.isnan(), math.inf)
    if comm.size > 1:
        comm.all_reduce(total, "max" if is_max else "sum").wait()
    return total[0] if is_max else total[0] ** (1.0 / norm_type)


def measured_norms(gradients: Iterable[ShardGradients]) -> list[Tensor] | None:
    """Returns the norms that were taken in backward; None unless they are those of all gradients there are now."""
    norms: list[Tensor] = []
    for each in gradients:
        if not each.is_cleared:
            measured = each.take_norms()
            if measured is None:
                return None
            norms += measured
    return norms or None
