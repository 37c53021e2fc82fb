"""Buckets of gradients: the way from what autograd gives to what an optimizer updates with.

    parameter.grad  --bring in, times the scale-->  buffer  --reduce-->  gradients that the optimizer sees

The gradients of a bucket travel together, in one flat buffer. What becomes of them differs:

- ``ReplicaBucket`` (data parallelism): gradients are views into the buffer, which lives as long as they do. Nothing is
  copied out. A gradient that is alone in its bucket is the buffer itself.
- ``SlicedBucket`` (ZeRO): a rank gets its slice, the gradients of its pieces. Stage 1 keeps the buffer and reduces in
  place: the slice is a part of it. Stage 2 gives the buffer back when it is reduced.

Gradients add up until somebody calls ``zero_grad()``. While ZeRO's sums lie elsewhere (stage 1 inside ``no_sync``:
whole; stage 2 with offloaded gradients: on the host) the pieces show something in their place, so that taking it away
is noticed, and drops the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.base import DONE, Communicator, Work
from paceline.engines.flat.flat import FlatGroup, dense_stride
from paceline.errors import UsageError
from paceline.shards import FlatLayout, flat_layout

_ALIGN = 32  # elements: keeps every view on a cache line, whatever the dtype
_LARGE_BYTES = 2**18  # about what a second-level cache holds


class GradientBucket:
    """Gradients that travel together, and how many of them are missing in this backward."""

    def __init__(self, members: Sequence[int], parameters: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        """Takes the parameters, and their numbers among those of the engine."""
        self.members = list(members)
        self.parameters = list(parameters)
        self.layout = layout
        self.num_missing = len(self.members)
        self.views: list[torch.Tensor] = []  # into the buffer, by place
        self._is_in = [False] * len(self.members)
        # On a CPU a large gradient is moved while it is in the cache; small ones wait for one another, since the first
        # call after a matrix product pays for cold code.
        self.is_large = [p.numel() * p.element_size() >= _LARGE_BYTES for p in self.parameters]

    def bring_in(self, place: int, gradient: torch.Tensor, scale: float) -> None:
        """Moves one gradient times ``scale`` into the buffer, in one pass."""
        self._open()
        view = self.views[place]
        if self._is_in[place]:
            view.add_(gradient, alpha=scale)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            view.copy_(gradient).mul_(scale)
        self._take(place)

    def fill(self, scale: float) -> None:
        """Brings in what is not in yet, all at once; zeros for gradients that are missing."""
        self._open()
        fresh: list[torch.Tensor] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, parameter in enumerate(self.parameters):
            gradient, view = parameter.grad, self.views[place]
            if gradient is None:
                if not self._is_in[place]:
                    view.zero_()
                continue
            if self._is_in[place]:
                if gradient is not view:
                    sums.append((view, gradient))
            else:
                fresh.append(view)
                if gradient is not view:
                    copies.append((view, gradient))
            self._take(place)
        if copies:
            torch._foreach_copy_([view for view, _ in copies], [gradient for _, gradient in copies])
        if scale != 1.0 and fresh:
            torch._foreach_mul_(fresh, scale)
        if sums:
            torch._foreach_add_([view for view, _ in sums], [gradient for _, gradient in sums], alpha=scale)

    def reset(self) -> None:
        """Ends a backward: no gradient of the next one has arrived."""
        self.num_missing = len(self.members)

    def _open(self) -> None:
        """Makes the buffer ready for this backward. Safe to call twice."""
        raise NotImplementedError

    def _take(self, place: int) -> None:
        """Ends the arrival of a gradient whose values are in the buffer."""
        raise NotImplementedError


class ReplicaBucket(GradientBucket):
    """The gradients of whole parameters, reduced where they lie; the last bucket also carries flags."""

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        *,
        scale: float,
        num_flags: int,
    ) -> None:
        """Takes the ranks that reduce the gradients, and the factor that these get before."""
        layout = flat_layout(
            [tuple(p.shape) for p in parameters],
            strides=[dense_stride(p) for p in parameters],
            align=_ALIGN,
            tail=num_flags,
        )
        super().__init__(members, parameters, layout)
        self.comm = comm
        self.scale = scale
        self.num_flags = num_flags
        self.work: Work = DONE
        self.buffer: torch.Tensor | None = None
        self.wire: torch.Tensor | None = None  # the buffer in another dtype, while it is reduced
        self.flags = torch.empty(0)
        # Whether the bucket's buffer is the gradient itself, wherever autograd put it.
        self.adopts = len(self.members) == 1 and num_flags == 0
        if self.adopts:
            self.is_large = [False]

    def use(self, buffer: torch.Tensor) -> None:
        """Takes a flat tensor of zeros as the buffer."""
        self.buffer = buffer
        self.views = [slot.view(buffer) for slot in self.layout.slots]
        self.flags = buffer[self.layout.length - self.num_flags :]  # travel behind the gradients

    def cast(self, place: int, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient in the bucket's dtype, at its place there."""
        if self.adopts:
            slot, first = self.layout.slots[0], self.parameters[0]
            return torch.empty_strided(slot.shape, slot.stride, dtype=first.dtype, device=first.device).copy_(gradient)
        self._open()
        return self.views[place].copy_(gradient)

    def fill(self, scale: float) -> None:
        """Brings in what is not in yet; a gradient that is alone becomes the buffer."""
        if not self.adopts:
            super().fill(scale)
            return
        self.buffer = _adopt(self.parameters[0], self.layout.slots[0].stride)
        if scale != 1.0:
            self.buffer.mul_(scale)

    def land(self) -> None:
        """Waits until the buffer holds what the reduction gave. Safe to call twice."""
        self.work.wait()
        self.work = DONE
        if self.wire is not None and self.buffer is not None:
            self.buffer.copy_(self.wire)
        self.wire = None

    def gradient(self, place: int) -> torch.Tensor:
        """Returns the reduced gradient of the bucket's n-th parameter."""
        if self.adopts and self.buffer is not None:
            slot = self.layout.slots[0]
            return self.buffer.as_strided(slot.shape, slot.stride)
        return self.views[place]

    def reset(self) -> None:
        super().reset()
        self.work, self.wire = DONE, None
        self._is_in = [False] * len(self.members)
        if self.adopts:  # the gradient is its parameter's again: zero_grad() must free it
            self.buffer = None

    def _open(self) -> None:
        if self.buffer is None:
            first = self.parameters[0]
            self.use(torch.zeros(self.layout.length, dtype=first.dtype, device=first.device))

    def _take(self, place: int) -> None:
        self.parameters[place].grad = self.views[place]
        self._is_in[place] = True


def _adopt(parameter: nn.Parameter, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a parameter's gradient as a flat buffer; a copy is made only if its memory is laid out differently."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if gradient.stride() != stride:
        dense = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = gradient = dense.copy_(gradient)
    return gradient.detach().as_strided((gradient.numel(),), (1,))


class Buffer:
    """Memory for whole gradients, and how groups have laid theirs out in it."""

    def __init__(self, group: FlatGroup) -> None:
        self.tensor = group.new_gradient()
        self._layouts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def lay_out(self, group: FlatGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the part of the buffer that a group needs, and in it the gradient of each parameter."""
        if id(group) not in self._layouts:
            views = [slot.view(self.tensor) for slot in group.layout.slots]
            self._layouts[id(group)] = self.tensor[: group.layout.length], views
        return self._layouts[id(group)]


class BufferPool:
    """Buffers for the buckets on their way. On a CPU two of them stay: there, new memory costs as much as filling it.

    A GPU's allocator keeps what is freed by itself.
    """

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self, group: FlatGroup) -> Buffer:
        """Returns a buffer that is large enough for the gradients of a group."""
        for buffer in self._free:
            if buffer.tensor.dtype == group.reduce_dtype and buffer.tensor.numel() >= group.layout.length:
                self._free.remove(buffer)
                return buffer
        return Buffer(group)

    def give_back(self, buffer: Buffer) -> None:
        """Keeps a buffer for the next bucket, if it is among the two largest."""
        if buffer.tensor.device.type == "cpu":
            self._free = sorted([*self._free, buffer], key=lambda each: -each.tensor.nbytes)[:2]


class SlicedBucket(GradientBucket):
    """The gradients of one flat group, of which each rank gets a slice."""

    def __init__(self, group: FlatGroup, members: Sequence[int], pool: BufferPool | None = None) -> None:
        """Without a ``pool`` the bucket keeps its buffer (stage 1)."""
        super().__init__(members, group.parameters, group.layout)
        self.group = group
        self._keeps_buffer = pool is None
        self._pool = pool or BufferPool()
        self._is_in_backward = False
        self._is_adding = False  # since the last synchronised backward
        self._buffer: Buffer | None = None
        self._whole = torch.empty(0)
        self._mine = torch.empty(0)
        self._work: Work | None = None
        self._used = [False] * len(self.members)  # in this accumulation
        self._had = [False] * len(self.members)  # a gradient before it
        self._carried: torch.Tensor | None = None
        self._shown: torch.Tensor | None = None
        self._shown_version = 0

    def send(self) -> None:
        """Issues the reduce-scatter of what is in the buffer, which must not be written until ``land``."""
        if self._keeps_buffer:
            _, self._work = self.group.reduce_scatter(self._whole)
        else:
            self._mine, self._work = self.group.reduce_scatter(self._whole, self.group.new_slice())

    @torch.no_grad()
    def land(self, *, is_last: bool) -> None:
        """Waits for the slice, and makes it the gradient of the pieces, or adds it to what they had.

        Safe to call twice. On the host it may still be on its way: ``group.finish_gradient`` waits for it.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        self.group.add_gradient(self._mine, is_last=is_last)
        if self._carried is not None and self.group.gradient is not None:
            self.group.finish_gradient()
            self.group.gradient += self._carried
            self._carried = None
        if not self._keeps_buffer:
            self._drop_buffer()
            if self.group.stashed is not None:
                self.show()

    def show(self) -> None:
        """Lets the pieces show sums that lie elsewhere: their part of them, or a zero where that has another dtype."""
        group = self.group
        is_same = self._keeps_buffer and group.dtype == group.reduce_dtype and not group.is_on_host
        shown = self._mine if is_same else torch.zeros_like(group.master[:1]).expand(group.master.shape)
        for place, piece in enumerate(group.pieces):
            if self._used[place] or self._had[place] or group.stashed is not None:
                begin, end = group.span(place)
                piece.grad = shown[begin:end]
        self._shown, self._shown_version = shown, shown._version

    def take_used(self) -> list[bool]:
        """Returns which parameters have a gradient on this rank; the next backward starts anew."""
        used = [is_used or had for is_used, had in zip(self._used, self._had, strict=True)]
        self._is_adding = False
        return used

    def abandon(self) -> None:
        """Forgets a backward that failed; what is under way is waited for, since it reads the buffer."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._carried = None
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._is_in_backward = False
        if not self._keeps_buffer:
            self._drop_buffer()

    def _take(self, place: int) -> None:
        self.parameters[place].grad = None
        self._is_in[place] = self._used[place] = True

    def _open(self) -> None:
        """Begins this bucket's part of a backward, once: decides what the new gradients are added to."""
        if self._is_in_backward:
            return
        if self._buffer is None:  # first of all: should there be no memory, nothing has changed
            self._buffer = self._pool.take(self.group)
            self._whole, self.views = self._buffer.lay_out(self.group)
            if self._keeps_buffer:
                self._mine = self._whole[self.group.start : self.group.stop]
        is_set = [piece.grad is not None for piece in self.group.pieces]
        if self._is_adding:
            self._check_shown(any(is_set))
            self._used = [used and still for used, still in zip(self._used, is_set, strict=True)]
            self._is_in = [is_in and still for is_in, still in zip(self._is_in, is_set, strict=True)]
            self._had = [had and still for had, still in zip(self._had, is_set, strict=True)]
        else:
            self._used, self._is_in = [False] * len(is_set), [False] * len(is_set)
            self._had = is_set
            if self._keeps_buffer and any(is_set):
                self._carry()
        self._is_adding = self._is_in_backward = True

    def _carry(self) -> None:
        """Puts the pieces' gradients aside: they lie where the new ones will."""
        self._carried = torch.zeros_like(self.group.master)
        for place, piece in enumerate(self.group.pieces):
            if piece.grad is not None:
                begin, end = self.group.span(place)
                self._carried[begin:end] = piece.grad
                piece.grad = None

    def _check_shown(self, is_any_set: bool) -> None:
        """Notices what became of sums that were shown: taken away, as ``zero_grad()`` does, or changed."""
        if self._shown is None:
            return
        if not is_any_set:
            self._carried = None
            self.group.stashed = None
        elif self._shown._version != self._shown_version:
            raise UsageError(
                "gradients that were accumulated inside no_sync() were changed before they were reduced\n"
                "  a rank sees a part of them only, and cannot tell what the change means for the rest\n"
                "  drop them with optimizer.zero_grad(set_to_none=True), or change them after the last backward"
            )
        self._shown = None
        for piece in self.group.pieces:
            piece.grad = None

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
        self._buffer = None
        self._whole = self._mine = torch.empty(0)
        self.views = []
        self._is_in = [False] * len(self._is_in)
