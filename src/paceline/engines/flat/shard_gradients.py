"""The gradients of a flat group: whole ones on their way, and this rank's slice of their mean.

    parameters' gradients  --copy in, times the scale-->  whole buffer  --reduce-scatter-->  slice: pieces' gradients

They live from the moment when every rank owns its slice. The optimizer sees views into the slice, and may take them
away: so what they were made of is compared before it is used again. Their one true norm is a sum over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, BucketReduction, Communicator, Work
from paceline.engines.flat.shard_layout import ShardLayout, SideStream, host_empty
from paceline.engines.groups import reduction

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
            norms.extend(
                [torch.dot(mine[begin:end], mine[begin:end]).sqrt_()] if is_one else torch._foreach_norm(views)
            )
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
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, coefficient.to(gradients[0]))


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
