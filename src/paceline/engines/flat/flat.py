"""Flat groups: parameters of one dtype in one buffer, of which every rank owns a slice.

    full      | weight ............ | pad | bias | pad | weight .......... | pad |     what the module computes with
    master    |  rank 0's slice  |  rank 1's slice  |  rank 2's slice  |               what the optimizers update
    gradient  as full, until it is reduce-scattered; then as master

The module's parameters are views into ``full``, so the output of an all-gather *is* the parameters. A rank's slice is
gathered from its own place in ``full``: the copy (and cast) from the master puts it there. ``full`` keeps its storage
object for life and only its memory comes and goes, because views that autograd saved in forward must see the values
that are gathered again for backward.

The optimizer gets one flat *piece* for each parameter: the part of it that lies in this rank's slice, empty on some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from paceline.comm.base import DONE, Communicator, Work
from paceline.engines.flat.side_stream import SideStream, host_empty
from paceline.engines.groups import ParameterGroups, expert_dim, mark_expert, reduction
from paceline.engines.precision import Precision
from paceline.models.unfilled import is_unfilled
from paceline.plan.layout import Offload
from paceline.shards import FlatLayout, flat_layout, row_major

_ALIGN = 32  # elements: keeps every view, and every slice, on a cache line, whatever the dtype
_DOTTED = (torch.float32, torch.float64)  # sums of squares in other dtypes would overflow, or lose too much


def mark_alone(parameters: Iterable[nn.Parameter]) -> None:
    """Asks engines to keep each of these in a flat group of its own.

    Another model part on other ranks has the same parameter: alone, its slices are the same wherever it lies.
    """
    for parameter in parameters:
        parameter._paceline_alone = True  # type: ignore[attr-defined]


def is_alone(parameter: nn.Parameter) -> bool:
    """Says whether a parameter has a flat group of its own."""
    return getattr(parameter, "_paceline_alone", False)


class FlatGroup:
    """Parameters of one dtype that are gathered, reduced and updated together."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], shared: ParameterGroups, precision: Precision, offload: Offload
    ) -> None:
        """Moves the parameters into a flat buffer on the device; ``keep_slice`` ends with a rank owning its slice.

        Parameters on the meta device get memory here, and values from whoever initialises them before ``keep_slice``.
        """
        self.names = tuple(name for name, _ in named)
        self.shared = shared
        self.comm = comm = shared.shard
        originals = [parameter for _, parameter in named]
        first = originals[0]
        self.is_trainable = first.requires_grad
        self.dtype = first.dtype
        self.param_dtype = self.dtype
        if precision.param_dtype is not None and first.is_floating_point():
            self.param_dtype = precision.param_dtype
        self.reduce_dtype = precision.reduce_dtype or self.dtype
        self.layout: FlatLayout = flat_layout(
            [tuple(p.shape) for p in originals],
            strides=[dense_stride(p) for p in originals],
            align=_ALIGN,
            num_shards=_ALIGN * comm.size,
        )
        self.start, self.stop = self.layout.shard_range(comm.rank, comm.size)
        self.shard_bytes = (self.stop - self.start) * self.dtype.itemsize
        self._offload = offload
        self.is_on_host = (offload.optimizer or offload.parameters) and comm.device.type != "cpu"
        self.is_unfilled = all(p.is_meta and is_unfilled(p) for p in originals)
        # The values are laid out in the dtype of the masters, so that these lose nothing.
        make = torch.empty if self.is_unfilled else torch.zeros
        self.full = make(self.layout.length, dtype=self.dtype, device=comm.device)
        views = [slot.view(self.full) for slot in self.layout.slots]
        self.parameters = [self._move(p, view) for p, view in zip(originals, views, strict=True)]
        self.master = torch.empty(0)
        self.pieces: list[nn.Parameter] = []
        self.resident: torch.Tensor | None = None  # this slice on the device, where the master alone is on the host
        self._staged: torch.Tensor | None = None  # the master in the parameters' dtype, on the host
        self._seen_version = -1
        self._had_gradient = False  # since the slice was last copied to the device
        self._is_in_place = False
        self.kept: torch.Tensor | None = None  # a part of ``full`` between forward and backward: ``keep_within``
        # Beside nothing, until an engine says otherwise.
        self.gathers = self.reductions = SideStream(torch.device("cpu"))
        self._copies = SideStream(comm.device if self.is_on_host else torch.device("cpu"))
        self.stashed: torch.Tensor | None = None  # gradients of earlier microbatches, on the host
        self.gradient: torch.Tensor | None = None  # this rank's slice; the pieces' gradients are views into it
        self._gradient_views: list[torch.Tensor] = []
        self._norms: tuple[int, Sequence[torch.Tensor], Work] | None = None  # of which version of the gradient

    @property
    def size_bytes(self) -> int:
        """How large the full parameters are."""
        return self.layout.length * self.param_dtype.itemsize

    @property
    def has_copy(self) -> bool:
        """Whether full parameters and masters are two things; on one rank, or if never freed, they may be one."""
        if self.param_dtype != self.dtype or self.is_on_host:
            return True
        return self.comm.size > 1 and not self._is_in_place

    @property
    def comes_and_goes(self) -> bool:
        """Whether the memory of ``full`` is freed and allocated again as training goes on."""
        return self.has_copy and not self._is_in_place

    def keep_slice(self, *, in_place: bool = False) -> None:
        """Makes this rank's master and pieces from the values in ``full``. Once, when these are final.

        ``in_place`` is for engines that never free ``full``: the master is this rank's place in it, where it can be.
        """
        self._is_in_place = in_place
        mine = self.full.detach()[self.start : self.stop]
        has_values = not self.is_unfilled
        if not has_values:
            mine = torch.empty_like(mine) if self.has_copy and not self.is_on_host else mine
            self._zero_gaps(mine)
        if self.is_on_host:
            self.master = host_empty(mine.numel(), self.dtype, self.comm.device).copy_(mine)
            if self.param_dtype != self.dtype:
                self._staged = host_empty(mine.numel(), self.param_dtype, self.comm.device)
        else:
            self.master = mine.clone() if self.has_copy and has_values else mine
        self.pieces = [self._piece(place) for place in range(len(self.names))]
        if self.param_dtype != self.dtype:
            self.full = self.full.to(self.param_dtype)
            for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
                parameter.data = slot.view(self.full)

    def _zero_gaps(self, mine: torch.Tensor) -> None:
        """Sets what lies between the parameters of a slice to zero: whoever fills these has no values for it."""
        end = 0
        for begin, stop in (self.span(place) for place in range(len(self.names))):
            mine[end:begin].zero_()
            end = stop
        mine[end:].zero_()

    def span(self, place: int) -> tuple[int, int]:
        """Returns where in the slice the piece of the n-th parameter lies."""
        slot = self.layout.slots[place]
        begin = min(max(slot.offset, self.start), self.stop)
        end = min(max(slot.offset + slot.numel, self.start), self.stop)
        return begin - self.start, end - self.start

    # Parameters.

    def allocate(self) -> None:
        """Gives ``full`` its memory back. Safe to call twice."""
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.size_bytes)

    def free(self) -> None:
        """Frees the memory of ``full``. Safe to call twice; does nothing where it is the master itself."""
        if self.has_copy:
            self.full.untyped_storage().resize_(0)

    @property
    def is_allocated(self) -> bool:
        """Whether ``full`` has memory."""
        return self.full.untyped_storage().size() > 0 or self.layout.length == 0

    def gather(self) -> Work:
        """Fills ``full`` from all ranks' masters."""
        if not self.has_copy and self.comm.size == 1:
            return DONE
        self.allocate()
        # Written through .data: autograd must not take the same values, gathered again, for a change of what it saved.
        full = self.full.data
        mine = full[self.start : self.stop]
        if self.is_on_host:
            self._copies.copy(mine, self._source())
            if self.comm.size == 1:
                return self._copies
            self._copies.wait()  # a collective is ordered behind what the device computes
            return self.comm.all_gather(full, mine)
        return self.gathers.issue(lambda: self._start_gather(full, mine))

    def _start_gather(self, full: torch.Tensor, mine: torch.Tensor) -> Work:
        if self.has_copy:
            mine.copy_(self.master.detach())
        return self.comm.all_gather(full, mine) if self.comm.size > 1 else DONE

    def keep_within(self, small: Communicator) -> None:
        """Keeps the slice of ``full`` that ``gather_within`` needs: a larger one, since ``small`` has fewer ranks."""
        begin, end = self.layout.shard_range(small.rank, small.size)
        self.kept = self.full.data[begin:end].clone() if self.has_copy else None

    def gather_within(self, small: Communicator) -> Work:
        """Fills ``full`` from the slices that the ranks of ``small`` have kept."""
        if self.kept is None:
            return DONE
        self.allocate()
        full = self.full.data
        begin, end = self.layout.shard_range(small.rank, small.size)
        full[begin:end].copy_(self.kept)
        return small.all_gather(full, full[begin:end]) if small.size > 1 else DONE

    def _source(self) -> torch.Tensor:
        """Returns this rank's slice, in the parameters' dtype: on the device, or pinned on the host."""
        master = self.master.detach()
        # Whether an optimizer may have stepped since. The version alone does not tell: fused ones do not raise it.
        if self._had_gradient or self._seen_version != self.master._version:
            self._seen_version = self.master._version
            self._had_gradient = any(piece.grad is not None for piece in self.pieces)
            if self._staged is not None:
                self._staged.copy_(master)
            if not self._offload.parameters:
                host = master if self._staged is None else self._staged
                self.resident = torch.empty_like(host, device=self.comm.device).copy_(host, non_blocking=True)
        if self.resident is not None:
            return self.resident
        return master if self._staged is None else self._staged

    def mark_changed(self) -> None:
        """Tells the group that the master has new values."""
        self._seen_version = -1

    # Gradients.

    def new_gradient(self) -> torch.Tensor:
        """Makes the flat buffer that gradients are brought into; nobody reads its padding."""
        return torch.empty(self.layout.length, dtype=self.reduce_dtype, device=self.comm.device)

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Takes the parameters' gradients away from them."""
        taken = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return taken

    def bring_in(self, gradient: torch.Tensor, taken: list[torch.Tensor | None], scale: float) -> None:
        """Moves gradients times ``scale`` into the buffer, zeros for those that are missing.

        On a CPU each is freed when it is in; elsewhere the caller keeps ``taken`` until the device has read it.
        """
        views, sources = [], []
        for place, (source, slot) in enumerate(zip(taken, self.layout.slots, strict=True)):
            view = slot.view(gradient)
            if source is None:
                view.zero_()
                continue
            views.append(view)
            sources.append(source)
            if gradient.device.type == "cpu":
                taken[place] = None
        if views and scale != 1.0 and sources[0].dtype == gradient.dtype:
            while sources:  # one pass over each, which is freed before the next
                torch.mul(sources.pop(), scale, out=views.pop())
        elif views:
            torch._foreach_copy_(views, sources)
            if scale != 1.0:
                torch._foreach_mul_(views, scale)

    def drop_gradient(self) -> None:
        """Frees the slice's gradient once the pieces have none. A CPU keeps the memory: to get it anew costs more."""
        if self.comm.device_kind != "cpu" and not self.is_on_host and all(p.grad is None for p in self.pieces):
            self.gradient, self._gradient_views = None, []

    def new_slice(self) -> torch.Tensor:
        """Returns where a reduce-scatter puts this rank's slice: the gradient itself, if there is none to add to."""
        is_fresh = all(piece.grad is None for piece in self.pieces)
        if is_fresh and self.gradient is not None and self.reduce_dtype == self.dtype and not self.is_on_host:
            return self.gradient
        return torch.empty(self.stop - self.start, dtype=self.reduce_dtype, device=self.comm.device)

    def reduce_scatter(self, gradient: torch.Tensor, output: torch.Tensor | None = None) -> tuple[torch.Tensor, Work]:
        """Averages the gradients of all ranks; returns this rank's slice, valid after the work, and the work.

        Without an ``output`` the slice is this rank's own place in ``gradient``.
        """
        mine = gradient[self.start : self.stop] if output is None else output
        if self.comm.size == 1:
            if output is not None:
                mine.copy_(gradient)
            return mine, DONE
        return mine, self.comm.reduce_scatter(mine, gradient, reduction(self.comm))

    def add_gradient(self, mine: torch.Tensor, *, is_last: bool = True) -> None:
        """Makes a reduced slice the pieces' gradient, or adds it to the one they have.

        On the host it may still be on its way: ``finish_gradient`` waits for it. Where gradients alone are offloaded,
        those of all microbatches but the last are summed on the host.
        """
        self._had_gradient = True
        if self._offload.gradients and not self.is_on_host and self.comm.device.type != "cpu":
            if not is_last:
                self._stash(mine)
                return
            if self.stashed is not None:
                mine = mine + self.stashed.to(mine.device, non_blocking=True)
                self.stashed = None
        if all(piece.grad is None for piece in self.pieces):
            self._set_gradient(mine)
        else:
            self._add_to_gradient(mine)
        for piece, view in zip(self.pieces, self._gradient_views, strict=True):
            piece.grad = view

    @torch.no_grad()
    def measure(self) -> None:
        """Takes the norms of the pieces' gradients, beside what the device computes; they are asked for later.

        On a CPU it is one norm of all of them, taken while they are in the cache or others are under way.
        """
        gradient, views = self.gradient, self._gradient_views
        if gradient is None or self.is_on_host:
            return
        norms: list[torch.Tensor] = []
        if self.comm.device_kind == "cpu":
            solid = self._without_gaps(gradient) if gradient.dtype in _DOTTED else None
            norms = list(torch._foreach_norm(views)) if solid is None else [torch.dot(solid, solid).sqrt_()]
            self._norms = (gradient._version, norms, DONE)
            return

        def take() -> Work:
            norms.extend(torch._foreach_norm(views))
            return DONE

        work = self.reductions.issue(take)
        self._norms = (gradient._version, norms, work)

    def norms(self) -> Sequence[torch.Tensor] | None:
        """Returns the norms that ``measure`` took, if the gradients are still the same ones."""
        taken, self._norms = self._norms, None
        if taken is None or not self.has_gradient_of(taken[0]):
            return None
        taken[2].wait()
        if len(taken[1]) != len(self.pieces):  # one norm of all
            return None if any(piece.grad is None for piece in self.pieces) else taken[1]
        return [norm for norm, piece in zip(taken[1], self.pieces, strict=True) if piece.grad is not None]

    @property
    def gradient_version(self) -> int:
        """A number that rises with every change of the gradient."""
        return -1 if self.gradient is None else self.gradient._version

    def has_gradient_of(self, version: int) -> bool:
        """Says whether the gradient is as it was then, and all that pieces have of one lies in it."""
        if self.gradient is None or self.gradient._version != version:
            return False
        pairs = zip(self.pieces, self._gradient_views, strict=True)
        return all(piece.grad is None or piece.grad is view for piece, view in pairs)

    def _without_gaps(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns the part of the slice that the pieces fill; None where what lies between two of them is no one's."""
        spans = [self.span(place) for place in range(len(self.names))]
        begin, end = min(first for first, _ in spans), max(last for _, last in spans)
        return gradient[begin:end] if sum(last - first for first, last in spans) == end - begin else None

    def finish_gradient(self) -> None:
        """Waits for the gradient to be on the host, if that is where it goes."""
        if self.is_on_host:
            self._copies.finish()

    def _set_gradient(self, mine: torch.Tensor) -> None:
        if mine is self.gradient:
            return
        if self.is_on_host:
            if self.gradient is None:
                self._keep_gradient(host_empty(mine.numel(), self.dtype, self.comm.device))
            assert self.gradient is not None
            self._copies.copy(self.gradient, mine.to(self.dtype))
        else:
            self._keep_gradient(mine.to(self.dtype))

    def _add_to_gradient(self, mine: torch.Tensor) -> None:
        if self.gradient is None:  # the loss has a term of the pieces themselves, whose gradients came first
            on_host = host_empty(mine.numel(), self.dtype, self.comm.device) if self.is_on_host else None
            self._keep_gradient(torch.zeros_like(mine, dtype=self.dtype) if on_host is None else on_host.zero_())
        assert self.gradient is not None
        self.finish_gradient()
        if mine is self.gradient:  # reduced into place, and such gradients came meanwhile
            for piece, view in zip(self.pieces, self._gradient_views, strict=True):
                if piece.grad is not None and piece.grad.data_ptr() != view.data_ptr():
                    view += piece.grad
            return
        for piece, view in zip(self.pieces, self._gradient_views, strict=True):
            if piece.grad is None:
                view.zero_()
            elif piece.grad.data_ptr() != view.data_ptr():  # the user has put another one there
                view.copy_(piece.grad)
        self.gradient += mine.to(self.gradient.device, self.gradient.dtype)

    def _stash(self, mine: torch.Tensor) -> None:
        if self.stashed is None:
            self.stashed = host_empty(mine.numel(), mine.dtype, self.comm.device).copy_(mine)
        else:
            self.stashed += mine.to(self.stashed.device)

    def _keep_gradient(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient
        self._gradient_views = [gradient[begin:end] for begin, end in map(self.span, range(len(self.names)))]

    # Whole tensors, for state dicts: one group at a time.

    def gather_whole(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns whole tensors from every rank's pieces of them, as views into one new buffer on the device."""
        dtype = pieces[0].dtype
        whole = torch.zeros(self.layout.length, dtype=dtype, device=self.comm.device)
        mine = whole[self.start : self.stop]
        for place, piece in enumerate(pieces):
            begin, end = self.span(place)
            mine[begin:end] = piece.detach().reshape(-1)
        if self.comm.size > 1:
            self.comm.all_gather(whole, mine).wait()
        return [slot.view(whole) for slot in self.layout.slots]

    def cut_piece(self, place: int, whole: torch.Tensor) -> torch.Tensor:
        """Returns the part of a whole tensor of the n-th parameter's shape that lies in this rank's slice.

        May be a view of ``whole``. Raises ValueError for another shape, which a copy would stretch to fit.
        """
        slot = self.layout.slots[place]
        if tuple(whole.shape) != slot.shape:
            raise ValueError(f"{self.names[place]} has the shape {list(slot.shape)}, not {list(whole.shape)}")
        begin, end = self.span(place)
        skip = max(self.start - slot.offset, 0)
        dense = whole
        if whole.stride() != slot.stride:
            dense = torch.empty_strided(slot.shape, slot.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return dense.as_strided((slot.numel,), (1,))[skip : skip + end - begin]

    def _piece(self, place: int) -> nn.Parameter:
        begin, end = self.span(place)
        piece = nn.Parameter(self.master[begin:end], requires_grad=self.is_trainable)
        piece.full_shape = self.layout.slots[place].shape  # type: ignore[attr-defined]
        dim = expert_dim(self.parameters[place])
        if dim is not None:
            mark_expert(piece, dim)
        return piece

    def _move(self, parameter: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
        if parameter.is_meta and not view.is_meta:
            made = nn.Parameter(view, requires_grad=parameter.requires_grad)
            dim = expert_dim(parameter)
            if dim is not None:
                mark_expert(made, dim)
            return made
        view.copy_(parameter.detach())
        parameter.data = view
        return parameter


def piece_places(groups: Iterable[FlatGroup]) -> dict[int, tuple[FlatGroup, int]]:
    """Returns the group of each piece, by its id, and its place there."""
    return {id(piece): (group, place) for group in groups for place, piece in enumerate(group.pieces)}


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole parameter of which this may be a piece."""
    return tuple(getattr(parameter, "full_shape", parameter.shape))


def dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that a parameter has in a flat buffer: its own if they leave no holes and no overlap."""
    step = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != step:
            return row_major(parameter.shape)
        step *= size
    return parameter.stride() if 0 not in parameter.stride() else row_major(parameter.shape)
