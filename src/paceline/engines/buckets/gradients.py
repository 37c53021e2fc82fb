"""Buckets of gradients: the way from what autograd gives to what an optimizer updates with.

    parameter.grad  --copy in, times the scale-->  buffer  --reduce-->  gradients that the optimizer sees

- ``ReplicaBucket`` (data parallelism): gradients are views into the buffer, which lives as long as they do. Nothing is
  copied out. A gradient that is alone in its bucket is the buffer itself.
- ``SlicedBucket`` (ZeRO): a rank gets its slice, the gradients of its pieces. Stage 1 keeps the buffer and reduces in
  place: the slice is a part of it. Stage 2 gives the buffer back when it is reduced.

Gradients add up until somebody calls ``zero_grad()``. While ZeRO's sums lie elsewhere (stage 1 inside ``no_sync``:
whole; stage 2 with offloaded gradients: on the host) the pieces have a *placeholder* as their gradient, so that taking
it away is noticed, and drops the sums.

``Arrivals`` counts gradients in. One is complete when it has arrived as often as in the first backward (twice under
re-entrant checkpointing), a bucket when all its gradients are. Buckets leave in one order on all ranks; what is missing
when backward ends, such as parameters that this rank did not use, leaves then. Hooks call it hundreds of times a step:
nothing there allocates or communicates.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, BucketReduction, Communicator, Work
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.flat.shard import ALIGN, ShardGradients, dense_stride
from paceline.errors import UsageError
from paceline.shards import FlatLayout, flat_layout

_LARGE_BYTES = 2**18  # about what a second-level cache holds


class GradientBucket:
    """Gradients that travel together, and how many of them are missing in this backward."""

    def __init__(self, members: Sequence[int], parameters: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        self.members = list(members)
        self.parameters = list(parameters)
        self.layout = layout
        self.num_missing = len(self.members)
        self.views: list[Tensor] = []  # into the buffer, by place
        self._is_filled = [False] * len(self.members)  # whether a view holds a gradient, to which the next is added
        # On a CPU a large gradient is moved while it is in the cache; small ones wait for one another, since the first
        # call after a matrix product pays for cold code.
        self.is_large = [p.numel() * p.element_size() >= _LARGE_BYTES for p in self.parameters]

    def copy_in(self, place: int, gradient: Tensor, scale: float) -> None:
        """Copies one gradient times ``scale`` into the buffer, in one pass."""
        self._prepare()
        view = self.views[place]
        if self._is_filled[place]:
            view.add_(gradient, alpha=scale)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            view.copy_(gradient).mul_(scale)
        self._mark_filled(place)

    def fill(self, scale: float) -> None:
        """Copies in what is not in the buffer yet, all at once; zeros for gradients that are missing."""
        self._prepare()
        fresh: list[Tensor] = []
        copies: list[tuple[Tensor, Tensor]] = []
        sums: list[tuple[Tensor, Tensor]] = []
        for place, parameter in enumerate(self.parameters):
            gradient, view = parameter.grad, self.views[place]
            if gradient is None:
                if not self._is_filled[place]:
                    view.zero_()
                continue
            if self._is_filled[place]:
                if gradient is not view:
                    sums.append((view, gradient))
            else:
                fresh.append(view)
                if gradient is not view:
                    copies.append((view, gradient))
            self._mark_filled(place)
        if copies:
            torch._foreach_copy_([view for view, _ in copies], [gradient for _, gradient in copies])
        if scale != 1.0 and fresh:
            torch._foreach_mul_(fresh, scale)
        if sums:
            torch._foreach_add_([view for view, _ in sums], [gradient for _, gradient in sums], alpha=scale)

    def reset(self) -> None:
        """Ends a backward: no gradient of the next one has arrived."""
        self.num_missing = len(self.members)

    def _prepare(self) -> None:
        """Makes the buffer ready for this backward. Safe to call twice."""

    def _mark_filled(self, place: int) -> None:
        """Notes that a gradient's values are in the buffer: the parameter's own tensor is not needed any more."""


class ReplicaBucket(GradientBucket):
    """The gradients of whole parameters, reduced where they lie; the last bucket also carries flags."""

    def __init__(
        self, members: Sequence[int], parameters: Sequence[nn.Parameter], comm: Communicator, scale: float, tail: int
    ) -> None:
        """Takes the ranks that reduce the gradients, the factor that these get before, and the number of flags."""
        shapes, strides = [tuple(p.shape) for p in parameters], [dense_stride(p) for p in parameters]
        super().__init__(members, parameters, flat_layout(shapes, strides=strides, align=ALIGN, tail=tail))
        self.comm = comm
        self.scale = scale
        self.num_flags = tail  # travel behind the gradients
        self.work: Work = DONE
        self.buffer: Tensor | None = None
        self.wire: Tensor | None = None  # the buffer in another dtype, while it is reduced
        self.flags = torch.empty(0)
        self.compressed: BucketReduction | None = None  # what takes the place of the all-reduce
        # Whether the bucket's buffer is the gradient itself, wherever autograd put it.
        self.adopts = len(self.members) == 1 and tail == 0
        if self.adopts:
            self.is_large = [False]

    def use(self, buffer: Tensor) -> None:
        """Takes a flat tensor of zeros as the buffer."""
        self.buffer = buffer
        self.views = self.layout.views(buffer)
        self.flags = buffer[self.layout.length - self.num_flags :]

    def cast(self, place: int, gradient: Tensor) -> Tensor:
        """Returns a gradient in the bucket's dtype, at its place there."""
        if self.adopts:
            slot, first = self.layout.slots[0], self.parameters[0]
            return torch.empty_strided(slot.shape, slot.stride, dtype=first.dtype, device=first.device).copy_(gradient)
        self._prepare()
        return self.views[place].copy_(gradient)

    def fill(self, scale: float) -> None:
        """Copies in what is not in the buffer yet; a gradient that is alone becomes the buffer."""
        if not self.adopts:
            super().fill(scale)
            return
        parameter, slot = self.parameters[0], self.layout.slots[0]
        gradient = parameter.grad
        if gradient is None:
            self.buffer = torch.zeros(slot.numel, dtype=parameter.dtype, device=parameter.device)
            return
        if gradient.stride() != slot.stride:  # its memory is laid out differently
            parameter.grad = gradient = self.cast(0, gradient)
        self.buffer = gradient.detach().as_strided((slot.numel,), (1,))
        if scale != 1.0:
            self.buffer.mul_(scale)

    def wait(self) -> None:
        """Waits until the buffer holds what the reduction gave. Safe to call twice."""
        self.work.wait()
        self.work = DONE
        if self.wire is not None and self.buffer is not None:
            self.buffer.copy_(self.wire)
        self.wire = None

    def gradient(self, place: int) -> Tensor:
        """Returns the reduced gradient of the bucket's n-th parameter."""
        if self.adopts and self.buffer is not None:
            slot = self.layout.slots[0]
            return self.buffer.as_strided(slot.shape, slot.stride)
        return self.views[place]

    def reset(self) -> None:
        super().reset()
        self.work, self.wire = DONE, None
        self._is_filled = [False] * len(self.members)
        if self.adopts:  # the gradient is its parameter's again: zero_grad() must free it
            self.buffer = None

    def _prepare(self) -> None:
        if self.buffer is None:
            first = self.parameters[0]
            self.use(torch.zeros(self.layout.length, dtype=first.dtype, device=first.device))

    def _mark_filled(self, place: int) -> None:
        self.parameters[place].grad = self.views[place]
        self._is_filled[place] = True


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for whole gradients, and the part that a group needs of it, with the gradient of each parameter."""

    tensor: Tensor
    layouts: dict[ShardGradients, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)


class BufferPool:
    """Buffers for the buckets on their way. On a CPU two stay: there, new memory costs as much as filling it."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self, gradients: ShardGradients) -> Buffer:
        """Returns a buffer that is large enough for the gradients of a group."""
        for buffer in self._free:
            is_large = buffer.tensor.numel() >= gradients.layout.length
            if is_large and buffer.tensor.dtype == gradients.reduce_dtype:
                self._free.remove(buffer)
                break
        else:
            buffer = Buffer(gradients.new_buffer())
        if gradients not in buffer.layouts:
            whole = buffer.tensor[: gradients.layout.length]
            buffer.layouts[gradients] = whole, gradients.layout.views(whole)
        return buffer

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
        self._is_accumulating = False  # since the last synchronised backward
        self._buffer: Buffer | None = None
        self._whole = torch.empty(0)
        self._slice = torch.empty(0)
        self._work: Work | None = None
        self._has_gradient = [False] * len(self.members)  # in this accumulation
        self._had_gradient = [False] * len(self.members)  # when it began
        self._earlier: Tensor | None = None  # the pieces' gradients from before it, which are added at its end
        self._placeholder: Tensor | None = None  # what pieces have as gradients while the sums lie elsewhere
        self._placeholder_version = 0

    def send(self) -> None:
        """Issues the reduce-scatter of what is in the buffer, which must not be written until ``wait``."""
        gradients = self.group.gradients
        if self._keeps_buffer:
            _, self._work = gradients.reduce_scatter(self._whole)
        else:
            self._slice, self._work = gradients.reduce_scatter(self._whole, gradients.new_slice())

    @torch.no_grad()
    def wait(self, *, is_last: bool) -> None:
        """Waits for the slice, and makes it the gradient of the pieces, or adds it to theirs. Safe to call twice."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        gradients = self.group.gradients
        gradients.add(self._slice, is_last=is_last)
        if self._earlier is not None and gradients.slice is not None:
            gradients.finish()
            gradients.slice += self._earlier
            self._earlier = None
        if not self._keeps_buffer:
            self._drop_buffer()
            if gradients.stashed is not None:
                self.show_placeholder()

    def show_placeholder(self) -> None:
        """Gives pieces whose sums lie elsewhere a gradient: their part of these, or a zero of their own dtype."""
        group, gradients = self.group, self.group.gradients
        is_same = self._keeps_buffer and group.dtype == gradients.reduce_dtype and group.host is None
        shown = self._slice if is_same else torch.zeros_like(group.master[:1]).expand(group.master.shape)
        for place, (begin, end) in enumerate(group.layout.spans):
            if self._has_gradient[place] or self._had_gradient[place] or gradients.stashed is not None:
                group.pieces[place].grad = shown[begin:end]
        self._placeholder, self._placeholder_version = shown, shown._version

    def end_accumulation(self) -> list[bool]:
        """Returns which parameters have a gradient on this rank; the next backward starts anew."""
        self._is_accumulating = False
        return [now or before for now, before in zip(self._has_gradient, self._had_gradient, strict=True)]

    def abandon(self) -> None:
        """Forgets a backward that failed; what is under way is waited for, since it reads the buffer."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._earlier = None
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._is_in_backward = False
        if not self._keeps_buffer:
            self._drop_buffer()

    def _mark_filled(self, place: int) -> None:
        self.parameters[place].grad = None
        self._is_filled[place] = self._has_gradient[place] = True

    def _prepare(self) -> None:
        """Begins this bucket's part of a backward, once: decides what the new gradients are added to."""
        if self._is_in_backward:
            return
        if self._buffer is None:  # first of all: should there be no memory, nothing has changed
            self._buffer = self._pool.take(self.group.gradients)
            self._whole, self.views = self._buffer.layouts[self.group.gradients]
            if self._keeps_buffer:
                self._slice = self._whole[self.group.layout.start : self.group.layout.stop]
        is_set = self.group.has_gradient
        if self._is_accumulating:
            if self._placeholder is not None:  # it was taken away, as ``zero_grad()`` does, or changed, or neither
                if not any(is_set):
                    self._earlier = None
                    self.group.gradients.stashed = None
                elif self._placeholder._version != self._placeholder_version:
                    raise UsageError(
                        "gradients that were accumulated inside no_sync() were changed before they were reduced\n"
                        "  a rank sees a part of them only, and cannot tell what the change means for the rest\n"
                        "  drop them with optimizer.zero_grad(set_to_none=True), or change them after the last backward"
                    )
                self._placeholder = None
                for piece in self.group.pieces:
                    piece.grad = None
            self._has_gradient = [now and still for now, still in zip(self._has_gradient, is_set, strict=True)]
            self._is_filled = [filled and still for filled, still in zip(self._is_filled, is_set, strict=True)]
            self._had_gradient = [before and still for before, still in zip(self._had_gradient, is_set, strict=True)]
        else:
            self._has_gradient, self._is_filled = [False] * len(is_set), [False] * len(is_set)
            self._had_gradient = is_set
            if self._keeps_buffer and any(is_set):  # put aside: they lie where the new ones will
                self._earlier = torch.zeros_like(self.group.master)
                for piece, (begin, end) in zip(self.group.pieces, self.group.layout.spans, strict=True):
                    if piece.grad is not None:
                        self._earlier[begin:end] = piece.grad
                        piece.grad = None
        self._is_accumulating = self._is_in_backward = True

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
        self._buffer = None
        self._whole = self._slice = torch.empty(0)
        self.views = []
        self._is_filled = [False] * len(self._is_filled)


B = TypeVar("B", bound=GradientBucket)


class Arrivals(Generic[B]):
    """The gradients of one backward, by the number of their parameter, and the buckets that they fill."""

    def __init__(self, names: Sequence[str], *, overlap: bool, graph_fix: str) -> None:
        """``overlap``: buckets leave during backward. ``graph_fix``: what to do about gradients with a graph."""
        self.names = list(names)
        self.buckets: list[B] = []  # in the order in which they leave
        self.num_left = 0  # of the buckets, in this backward
        self.counts = [0] * len(self.names)
        self.seen: list[int] = []  # in the order of arrival, while the engine learns
        self.expected: list[int] | None = None  # how often each arrives; 0: never seen, so complete when backward ends
        self.is_open = False  # whether a backward is under way
        self.reduces = True  # that backward, or the last one: else it accumulates
        self._overlap = overlap
        self._graph_fix = graph_fix
        self.place_of: dict[int, tuple[B, int]] = {}  # by number: the bucket, and the place in it
        self._complete: set[int] = set()
        self._task = -1  # autograd's number of the backward
        self._watched: set[int] = set()

    def watch(self, engine: object, arrive: Callable[..., None], parameters: Mapping[int, nn.Parameter]) -> None:
        """Lets autograd call ``arrive(engine, number, parameter)`` for each gradient; a parameter is watched once."""
        proxy: Any = weakref.proxy(engine)  # the garbage collector does not see what a hook refers to
        for index in parameters.keys() - self._watched:
            hook = functools.partial(arrive, proxy, index)
            parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._watched.add(index)

    def arrange(self, buckets: Sequence[B]) -> None:
        """Sets the buckets, in the order in which they leave. No backward may be under way."""
        self.buckets = list(buckets)
        self.place_of = {index: (b, place) for b in self.buckets for place, index in enumerate(b.members)}

    def open(self, finish: Callable[[], None], *, reduces: bool = True) -> None:
        """Begins a backward, at whose end autograd calls ``finish``.

        Called when the gradient enters the module's outputs, not with the first gradient of a parameter: under
        re-entrant checkpointing that one belongs to an inner backward, which ends long before the outer one.
        """
        self.is_open, self.reduces = True, reduces
        self._task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def check(self, index: int, gradient: Tensor) -> None:
        """Raises UsageError for a gradient that cannot be reduced."""
        if gradient.is_sparse:
            raise UsageError(
                f"{self.names[index]} has a sparse gradient\n  buckets are dense\n"
                "  build its nn.Embedding with sparse=False, or freeze it"
            )
        if gradient.requires_grad:
            raise UsageError(
                f"{self.names[index]} has a gradient with a graph (backward(create_graph=True))\n"
                f"  a reduced gradient cannot be differentiated again\n  {self._graph_fix}"
            )

    def count(self, index: int, *, may_leave: bool) -> tuple[B, int] | None:
        """Counts a gradient in; returns its bucket and place when it is complete, and buckets may leave.

        ``may_leave``: in a first backward, what arrives in the outer one is complete at once: autograd adds up all
        uses, and only a backward within the backward brings another one.
        """
        self.counts[index] += 1
        if self.expected is None:
            self.seen.append(index)
            is_complete = may_leave and self.counts[index] == 1 and torch._C._current_graph_task_id() == self._task
        else:
            is_complete = self.counts[index] == self.expected[index]
        if not self._overlap:
            return None
        if is_complete:
            self._complete.add(index)
            found = self.place_of[index]
            found[0].num_missing -= 1
            return found
        if index in self._complete:
            raise UsageError(
                f"{self.names[index]} got its gradient number {self.counts[index]} after it was counted in\n"
                "  with overlap, every backward must visit a parameter as often as the first one did, and re-entrant\n"
                "  checkpoints must not share parameters with the rest of the model\n"
                "  set comm.overlap = false (parallelize(..., overlap=False))"
            )
        return None

    def take_leaving(self, *, is_end: bool) -> Iterator[B]:
        """Yields the buckets that leave now: a complete one waits for those before it; at the end of backward all."""
        while self.num_left < len(self.buckets) and (is_end or self.buckets[self.num_left].num_missing == 0):
            self.num_left += 1
            yield self.buckets[self.num_left - 1]

    def learn(self) -> None:
        """Keeps how often gradients arrived, for those that had not been seen before."""
        before = self.expected or [0] * len(self.counts)
        if 0 in before:
            self.expected = [known or now for known, now in zip(before, self.counts, strict=True)]

    def forget_counts(self) -> None:
        self.seen, self.counts = [], [0] * len(self.names)

    def reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.forget_counts()
        self.num_left = 0
        self._complete.clear()
        self.is_open = False
