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

from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.base import DONE, Communicator, ReduceOp, Work
from paceline.layout import FlatLayout, flat_layout, row_major
from paceline.memory.offload import Offload, host_empty
from paceline.precision import Precision

_ALIGN = 32  # elements: keeps every view, and every slice, on a cache line, whatever the dtype


class FlatGroup:
    """Parameters of one dtype that are gathered, reduced and updated together."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        comm: Communicator,
        precision: Precision,
        offload: Offload,
    ) -> None:
        """Moves the parameters into a flat buffer on the device; ``keep_slice`` ends with a rank owning its slice.

        Parameters on the meta device get memory here, and values from whoever initialises them before ``keep_slice``.
        """
        self.names = tuple(name for name, _ in named)
        self.comm = comm
        originals = [parameter for _, parameter in named]
        first = originals[0]
        self.is_trainable = first.requires_grad
        self.dtype = first.dtype
        self.param_dtype = self.dtype
        if precision.param_dtype is not None and first.is_floating_point():
            self.param_dtype = precision.param_dtype
        self.reduce_dtype = precision.reduce_dtype or self.param_dtype
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
        # The values are laid out in the dtype of the masters, so that these lose nothing.
        self.full = torch.zeros(self.layout.length, dtype=self.dtype, device=comm.device)
        self.parameters = [self._move(p, slot.view(self.full)) for p, slot in zip(originals, self.layout.slots, strict=True)]
        self.master = torch.empty(0)
        self.pieces: list[nn.Parameter] = []
        self._resident: torch.Tensor | None = None  # this slice on the device, where the master is on the host
        self._staged: torch.Tensor | None = None  # the master in the parameters' dtype, on the host
        self._seen_version = -1

    @property
    def size_bytes(self) -> int:
        """How large the full parameters are."""
        return self.layout.length * self.param_dtype.itemsize

    @property
    def has_copy(self) -> bool:
        """Whether full parameters and masters are two things; on one rank they may be one."""
        return self.comm.size > 1 or self.param_dtype != self.dtype or self.is_on_host

    def keep_slice(self) -> None:
        """Makes this rank's master and pieces from the values in ``full``. Once, when these are final."""
        mine = self.full.detach()[self.start : self.stop]
        if self.is_on_host:
            self.master = host_empty(mine.numel(), self.dtype, self.comm.device).copy_(mine)
            if self.param_dtype != self.dtype:
                self._staged = host_empty(mine.numel(), self.param_dtype, self.comm.device)
        else:
            self.master = mine.clone() if self.has_copy else mine
        self.pieces = [self._piece(place) for place in range(len(self.names))]
        if self.param_dtype != self.dtype:
            self.full = self.full.to(self.param_dtype)
            for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
                parameter.data = slot.view(self.full)

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
        if not self.has_copy:
            return DONE
        self.allocate()
        # Written through .data: autograd must not take the same values, gathered again, for a change of what it saved.
        full = self.full.data
        mine = full[self.start : self.stop]
        mine.copy_(self._source(), non_blocking=True)
        return self.comm.all_gather(full, mine) if self.comm.size > 1 else DONE

    def _source(self) -> torch.Tensor:
        """Returns this rank's slice where the device can copy it from without waiting for the host."""
        master = self.master.detach()
        if not self.is_on_host:
            return master
        if self._seen_version != self.master._version:
            self._seen_version = self.master._version
            if self._staged is not None:
                self._staged.copy_(master)
            if not self._offload.parameters:
                host = master if self._staged is None else self._staged
                self._resident = host.to(self.comm.device, non_blocking=True)
        if self._resident is not None:
            return self._resident
        return master if self._staged is None else self._staged

    # Gradients.

    def new_gradient(self) -> torch.Tensor:
        """Makes the flat buffer that gradients are brought into; its padding is zero."""
        return torch.zeros(self.layout.length, dtype=self.reduce_dtype, device=self.comm.device)

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

    def add_gradient(self, mine: torch.Tensor) -> None:
        """Makes a reduced slice the pieces' gradient, or adds it to the one they have."""
        if self.is_on_host:
            mine = mine.to("cpu", self.dtype)  # sync point: the host updates with it next
        elif mine.dtype != self.dtype:
            mine = mine.to(self.dtype)
        for place, piece in enumerate(self.pieces):
            begin, end = self.span(place)
            if piece.grad is None:
                piece.grad = mine[begin:end]
            else:
                piece.grad += mine[begin:end]

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
        """Returns the part of a whole tensor of the n-th parameter's shape that lies in this rank's slice."""
        slot = self.layout.slots[place]
        begin, end = self.span(place)
        skip = max(self.start - slot.offset, 0)
        dense = torch.empty_strided(slot.shape, slot.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return dense.as_strided((slot.numel,), (1,))[skip : skip + end - begin]

    def _piece(self, place: int) -> nn.Parameter:
        begin, end = self.span(place)
        piece = nn.Parameter(self.master[begin:end], requires_grad=self.is_trainable)
        piece.full_shape = self.layout.slots[place].shape  # type: ignore[attr-defined]
        return piece

    def _move(self, parameter: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
        if parameter.is_meta:
            return nn.Parameter(view, requires_grad=parameter.requires_grad)
        view.copy_(parameter.detach())
        parameter.data = view
        return parameter


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole parameter of which this may be a piece."""
    return tuple(getattr(parameter, "full_shape", parameter.shape))


def reduction(comm: Communicator) -> ReduceOp:
    """Returns how gradients are reduced: NCCL averages as it adds; elsewhere ``gradient_scale`` is part of a copy."""
    return "sum" if comm.device.type == "cpu" else "avg"


def gradient_scale(comm: Communicator) -> float:
    """Returns the factor that gradients get when they are brought into a buffer."""
    return 1.0 / comm.size if comm.device.type == "cpu" else 1.0


def dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that a parameter has in a flat buffer: its own if they leave no holes."""
    span = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True)) + 1
    is_dense = parameter.numel() == 0 or (span == parameter.numel() and 0 not in parameter.stride())
    return parameter.stride() if is_dense else row_major(parameter.shape)
