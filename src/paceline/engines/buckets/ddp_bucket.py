"""The buckets of data parallelism: gradients that are reduced together, and the flat buffer they lie in.

A bucket's buffer costs as much memory as its gradients, which are views into it: nothing is copied out. A gradient that
is alone in its bucket is the buffer itself.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.comm.base import DONE, Work
from paceline.engines.flat.flat import dense_stride
from paceline.shards import FlatLayout, flat_layout

_ALIGN = 32  # elements: keeps every view on a cache line, whatever the dtype


class GradientBucket:
    """Gradients that are reduced together, and the buffer they lie in."""

    def __init__(self, members: list[int], parameters: list[nn.Parameter], *, num_flags: int) -> None:
        self.members = members
        self.parameters = parameters
        self.num_flags = num_flags
        self.work: Work | None = None
        self.num_missing = len(members)
        self.layout: FlatLayout = flat_layout(
            [tuple(p.shape) for p in parameters],
            strides=[dense_stride(p) for p in parameters],
            align=_ALIGN,
            tail=num_flags,
        )
        self.buffer: torch.Tensor | None = None
        self.wire: torch.Tensor | None = None  # the buffer in another dtype, while it is reduced
        self.views: list[torch.Tensor] = []
        self.flags = torch.empty(0)
        self._is_in = [False] * len(members)

    @property
    def adopts(self) -> bool:
        """Whether the bucket's buffer is the gradient itself, wherever autograd put it."""
        return len(self.members) == 1 and self.num_flags == 0

    def reset(self) -> None:
        """Forgets the step: no gradient has arrived."""
        self.work = self.wire = None
        self.num_missing = len(self.members)
        self._is_in = [False] * len(self.members)
        if self.adopts:  # the gradient is its parameter's again: zero_grad() must free it
            self.buffer = None

    def cast(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient in the bucket's dtype, at its place there."""
        if self.adopts:
            slot, first = self.layout.slots[0], self.parameters[0]
            return torch.empty_strided(slot.shape, slot.stride, dtype=first.dtype, device=first.device).copy_(gradient)
        if self.buffer is None:
            self._allocate()
        return self.views[position].copy_(gradient)

    def bring_in(self, position: int, scale: float) -> None:
        """Moves one gradient times ``scale`` into the buffer, in one pass."""
        if self.buffer is None:
            self._allocate()
        parameter, view = self.parameters[position], self.views[position]
        assert parameter.grad is not None
        torch.mul(parameter.grad, scale, out=view)
        parameter.grad = view
        self._is_in[position] = True

    def fill(self, scale: float) -> torch.Tensor:
        """Brings in what is not in yet, all at once, zeros for gradients that are missing; returns the buffer."""
        if self.adopts:
            self.buffer = _adopt(self.parameters[0], self.layout.slots[0].stride)
            return self.buffer.mul_(scale) if scale != 1.0 else self.buffer
        if self.buffer is None:
            self._allocate()
        views, targets, sources = [], [], []
        for parameter, view, is_in in zip(self.parameters, self.views, self._is_in, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif not is_in:
                views.append(view)
                if gradient is not view:
                    targets.append(view)
                    sources.append(gradient)
                    parameter.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)
        if scale != 1.0 and views:
            torch._foreach_mul_(views, scale)
        assert self.buffer is not None
        return self.buffer

    def land(self) -> None:
        """Waits until the buffer holds what the reduction gave. Safe to call twice."""
        assert self.work is not None
        self.work.wait()
        self.work = DONE
        if self.wire is not None:
            assert self.buffer is not None
            self.buffer.copy_(self.wire)
            self.wire = None

    def _allocate(self) -> None:
        first = self.parameters[0]
        self.use(torch.zeros(self.layout.length, dtype=first.dtype, device=first.device))

    def use(self, buffer: torch.Tensor) -> None:
        """Takes a flat tensor of zeros as the buffer."""
        self.buffer = buffer
        self.views = [slot.view(buffer) for slot in self.layout.slots]
        self.flags = buffer[self.layout.length - self.num_flags :]  # travel behind the gradients

    def gradient(self, position: int) -> torch.Tensor:
        """Returns the reduced gradient of the bucket's n-th parameter."""
        assert self.buffer is not None
        if self.adopts:
            slot = self.layout.slots[0]
            return self.buffer.as_strided(slot.shape, slot.stride)
        return self.views[position]


def _adopt(parameter: nn.Parameter, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a parameter's gradient as a flat buffer; a copy is made only if its memory is laid out differently."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if gradient.stride() != stride:
        dense = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = gradient = dense.copy_(gradient)
    return gradient.detach().as_strided((gradient.numel(),), (1,))
