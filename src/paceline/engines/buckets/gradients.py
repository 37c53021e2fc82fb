"""A bucket of gradients: the way from what autograd gives to the slice that this rank updates with.

    parameter.grad  --bring in, times the scale-->  buffer  --reduce-scatter-->  slice  =  gradients of the pieces

Stage 1 keeps the buffer and reduces in place: the slice is a part of it. Stage 2 gives it back when it is reduced.

Gradients add up until somebody calls ``zero_grad()`` on the pieces. While sums lie elsewhere (stage 1 inside
``no_sync``: whole; stage 2 with offloaded gradients: on the host) the pieces show something in their place, so that
taking it away is noticed, and drops the sums.
"""

from __future__ import annotations

import torch

from paceline.comm.base import Work
from paceline.engines.flat.flat import FlatGroup
from paceline.errors import UsageError


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


class GradientBucket:
    """The gradients of one flat group."""

    def __init__(self, group: FlatGroup, pool: BufferPool | None = None) -> None:
        """Without a ``pool`` the bucket keeps its buffer (stage 1)."""
        self.group = group
        self.num_missing = len(group.names)
        self._keeps_buffer = pool is None
        self._pool = pool or BufferPool()
        self._is_in_backward = False
        self._is_adding = False  # since the last synchronised backward
        self._buffer: Buffer | None = None
        self._whole = torch.empty(0)
        self._views: list[torch.Tensor] = []
        self._mine = torch.empty(0)
        self._work: Work | None = None
        self._is_in = [False] * len(group.names)  # the buffer
        self._used = [False] * len(group.names)  # in this accumulation
        self._had = [False] * len(group.names)  # a gradient before it
        self._carried: torch.Tensor | None = None
        self._shown: torch.Tensor | None = None
        self._shown_version = 0

    def bring_in(self, place: int, scale: float) -> None:
        """Moves one gradient times ``scale`` into the buffer, in one pass."""
        self._open()
        parameter, view = self.group.parameters[place], self._views[place]
        gradient = parameter.grad
        assert gradient is not None
        if self._is_in[place]:
            view.add_(gradient, alpha=scale)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            view.copy_(gradient).mul_(scale)
        parameter.grad = None
        self._is_in[place] = self._used[place] = True

    def fill(self, scale: float) -> None:
        """Brings in what is not in yet, all at once; zeros for gradients that are missing."""
        self._open()
        fresh: list[torch.Tensor] = []
        fresh_sources: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        sum_sources: list[torch.Tensor] = []
        for place, parameter in enumerate(self.group.parameters):
            gradient = parameter.grad
            if gradient is None:
                if not self._is_in[place]:
                    self._views[place].zero_()
                continue
            (sums if self._is_in[place] else fresh).append(self._views[place])
            (sum_sources if self._is_in[place] else fresh_sources).append(gradient)
            parameter.grad = None
            self._is_in[place] = self._used[place] = True
        if fresh:
            torch._foreach_copy_(fresh, fresh_sources)
            if scale != 1.0:
                torch._foreach_mul_(fresh, scale)
        if sums:
            torch._foreach_add_(sums, sum_sources, alpha=scale)

    def send(self) -> None:
        """Issues the reduce-scatter of what is in the buffer."""
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
        if self._carried is not None:
            assert self.group.gradient is not None
            self.group.finish_gradient()
            self.group.gradient += self._carried
            self._carried = None
        if not self._keeps_buffer:
            self._drop_buffer()
            if self.group.has_stash:
                self.show()

    def show(self) -> None:
        """Lets the pieces show sums that lie elsewhere: their part of them, or a zero where that has another dtype."""
        group = self.group
        is_same = self._keeps_buffer and group.dtype == group.reduce_dtype and not group.is_on_host
        shown = self._mine if is_same else torch.zeros_like(group.master[:1]).expand(group.master.shape)
        for place, piece in enumerate(group.pieces):
            if self._used[place] or self._had[place] or group.has_stash:
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
        """Ends a backward."""
        self._is_in_backward = False
        self.num_missing = len(self._is_in)
        if not self._keeps_buffer:
            self._drop_buffer()

    def _open(self) -> None:
        """Begins this bucket's part of a backward, once: decides what the new gradients are added to."""
        if self._is_in_backward:
            return
        if self._buffer is None:  # first of all: should there be no memory, nothing has changed
            self._buffer = self._pool.take(self.group)
            self._whole, self._views = self._buffer.lay_out(self.group)
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
            self.group.drop_stash()
        elif self._shown._version != self._shown_version:
            raise UsageError(
                "gradients that were accumulated inside no_sync() were changed before they were reduced\n"
                "  a rank sees a part of them only, and cannot tell what the change means for the rest\n"
                "  drop them with optimizer.zero_grad(set_to_none=True), or change them after the last backward"
            )
        self._hide()

    def _hide(self) -> None:
        self._shown = None
        for piece in self.group.pieces:
            piece.grad = None

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
        self._buffer = None
        self._whole = self._mine = torch.empty(0)
        self._views = []
        self._is_in = [False] * len(self._is_in)
