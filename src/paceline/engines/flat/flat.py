"""Flat groups: parameters of one dtype in one buffer, of which every rank owns a slice.

    full      | weight ............ | pad | bias | pad | weight .......... | pad |     what the module computes with
    master    |  rank 0's slice  |  rank 1's slice  |  rank 2's slice  |               what the optimizers update

The module's parameters are views into ``full``, so the output of an all-gather *is* the parameters. A rank's slice is
gathered from its own place in ``full``: the copy (and cast) from the master puts it there. ``full`` keeps its storage
object for life and only its memory comes and goes, because views that autograd saved in forward must see the values
that are gathered again for backward.

The optimizer gets one flat *piece* for each parameter: the part of it that lies in this rank's slice, empty on some.
Where what lies, and the gradients' side, is in ``shard.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, Communicator, Work
from paceline.engines.flat.shard import ALIGN, HostShard, ShardGradients, ShardLayout, SideStream
from paceline.engines.float8 import E4M3, round_to, scales_of
from paceline.engines.groups import ParameterGroups, expert_dim, mark_expert
from paceline.engines.precision import Precision
from paceline.models.hugging_face import is_unfilled
from paceline.plan.layout import Offload
from paceline.shards import round_up


def mark_alone(parameters: Iterable[nn.Parameter]) -> None:
    """Asks engines for a flat group of each: so its slices are the same on all ranks, whatever else they hold."""
    for parameter in parameters:
        parameter._paceline_alone = True  # type: ignore[attr-defined]


def is_alone(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "_paceline_alone", False)


class FlatGroup:
    """The memory of parameters of one dtype that are gathered, reduced and updated together."""

    # What a group has once ``keep_slice`` was called.
    master: Tensor
    pieces: list[nn.Parameter]
    gradients: ShardGradients
    has_copy: bool  # full parameters and masters are two things; on one rank, or if never freed, they may be one
    comes_and_goes: bool  # the memory of ``full`` is freed and allocated again as training goes on

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], shared: ParameterGroups, precision: Precision, offload: Offload
    ) -> None:
        """Moves the parameters into a flat buffer on the device; meta ones get memory, and values by ``keep_slice``."""
        self.shared = shared
        self.comm = comm = shared.shard
        self.layout = ShardLayout.of(named, comm.rank, comm.size)
        originals = [parameter for _, parameter in named]
        first = originals[0]
        self.dtype = self.param_dtype = first.dtype
        if precision.param_dtype is not None and first.is_floating_point():
            self.param_dtype = precision.param_dtype
        self._reduce_dtype = precision.reduce_dtype
        self._offload = offload
        self.is_unfilled = all(p.is_meta and is_unfilled(p) for p in originals)
        # The values are laid out in the dtype of the masters, so that these lose nothing.
        make = torch.empty if self.is_unfilled else torch.zeros
        self.full = make(self.layout.length, dtype=self.dtype, device=comm.device)
        self.parameters = []
        for parameter, view in zip(originals, self.layout.views(self.full), strict=True):
            if parameter.is_meta and not view.is_meta:
                made = nn.Parameter(view, requires_grad=parameter.requires_grad)
                self.parameters.append(_marked_as(parameter, made))
            else:
                view.copy_(parameter.detach())
                parameter.data = view
                self.parameters.append(parameter)
        self.host: HostShard | None = None  # where the masters are on the host
        self.kept: Tensor | None = None  # a part of ``full`` between forward and backward: ``keep_within``
        self.gathers = SideStream(torch.device("cpu"))  # beside nothing, until an engine says otherwise

    @property
    def size_bytes(self) -> int:
        return self.layout.length * self.param_dtype.itemsize

    @property
    def has_gradient(self) -> list[bool]:
        return [piece.grad is not None for piece in self.pieces]

    def keep_slice(self, *, in_place: bool = False) -> None:
        """Makes master and pieces from ``full``, once; ``in_place``: the master is a part of it, never freed."""
        offload, device = self._offload, self.comm.device
        is_on_host = (offload.optimizer or offload.parameters) and device.type != "cpu"
        is_cast = self.param_dtype != self.dtype
        self.has_copy = is_cast or is_on_host or (self.comm.size > 1 and not in_place)
        self.comes_and_goes = self.has_copy and not in_place
        mine = self.full.detach()[self.layout.start : self.layout.stop]
        if self.is_unfilled:
            mine = torch.empty_like(mine) if self.has_copy and not is_on_host else mine
            edges = [0, *itertools.chain(*self.layout.spans), self.layout.shard_length]
            for begin, end in zip(edges[::2], edges[1::2], strict=True):  # gaps, for which nobody has values
                mine[begin:end].zero_()
        if is_on_host:
            self.host = HostShard(mine, self.param_dtype, stays_on_device=not offload.parameters)
            self.master = self.host.master
        else:
            self.master = mine.clone() if self.has_copy and not self.is_unfilled else mine
        self.pieces = []
        values = self.layout.pieces(self.master)
        for parameter, slot, value in zip(self.parameters, self.layout.slots, values, strict=True):
            piece = nn.Parameter(value, requires_grad=parameter.requires_grad)
            piece.full_shape = slot.shape  # type: ignore[attr-defined]
            self.pieces.append(_marked_as(parameter, piece))
        reduced, aside = self._reduce_dtype or self.dtype, SideStream(torch.device("cpu"))
        copies = None if self.host is None else self.host.copies
        stashes = offload.gradients and copies is None and device.type != "cpu"
        self.gradients = ShardGradients(
            self.layout, self.comm, self.pieces, self.dtype, reduced, aside, copies, stashes
        )
        if is_cast:
            self.full = self.full.to(self.param_dtype)
            for parameter, view in zip(self.parameters, self.layout.views(self.full), strict=True):
                parameter.data = view

    def allocate(self) -> None:
        """Gives ``full`` its memory back. Safe to call twice."""
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.size_bytes)

    def free(self) -> None:
        """Frees the memory of ``full``. Safe to call twice; does nothing where it is the master itself."""
        if self.has_copy:
            self.full.untyped_storage().resize_(0)

    def gather(self) -> Work:
        """Fills ``full`` from all ranks' masters."""
        if not self.has_copy and self.comm.size == 1:
            return DONE
        self.allocate()
        # Written through .data: autograd must not take the same values, gathered again, for a change of what it saved.
        full = self.full.data
        mine = full[self.layout.start : self.layout.stop]
        if self.host is None:
            return self.gathers.issue(lambda: self._start_gather(full, mine))
        copied = self.host.copy_to(mine, may_have_changed=self.gradients.take_arrived())
        if self.comm.size == 1:
            return copied
        copied.wait()  # a collective is ordered behind what the device computes
        return self.comm.all_gather(full, mine)

    def _start_gather(self, full: Tensor, mine: Tensor) -> Work:
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

    def gather_whole(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Returns whole tensors from every rank's pieces of them, as views into one new buffer: for state dicts."""
        whole = torch.zeros(self.layout.length, dtype=pieces[0].dtype, device=self.comm.device)
        mine = whole[self.layout.start : self.layout.stop]
        for target, piece in zip(self.layout.pieces(mine), pieces, strict=True):
            target[:] = piece.detach().reshape(-1)
        if self.comm.size > 1:
            self.comm.all_gather(whole, mine).wait()
        return self.layout.views(whole)


def _marked_as(parameter: nn.Parameter, made: nn.Parameter) -> nn.Parameter:
    dim = expert_dim(parameter)
    if dim is not None:
        mark_expert(made, dim)
    return made


def piece_places(groups: Iterable[FlatGroup]) -> dict[int, tuple[FlatGroup, int]]:
    """Returns the group of each piece, by its id, and its place there."""
    return {id(piece): (group, place) for group in groups for place, piece in enumerate(group.pieces)}


_SCALE = 4  # bytes


class Float8Group(FlatGroup):
    """Weights of linear layers that read no more of them than 8 bits a number, and so are gathered in e4m3.

        wire      | rank 0: its slice in e4m3, its scales | rank 1: its slice, its scales | ...      1 byte a number
        full      | weight ............ | pad | weight .................. | pad |                    bf16, as ever

    Each rank casts its slice with scales of its own, one for each weight that it has a part of, and sends them along:
    no rank waits to learn a maximum of all. What arrives is put back as bf16, which is exact. A layer that casts it
    again finds the same 8 bits: scales are powers of two (see [Note: powers of two] in ``engines/float8.py``).
    """

    def gather(self) -> Work:
        if self.comm.size == 1:
            return super().gather()
        self.allocate()
        # What a rank sends: its slice, and the inverse scale of each of its pieces.
        row_bytes = self.layout.shard_length + round_up(_SCALE * len(self.layout.names), ALIGN)
        wire = torch.empty(self.comm.size, row_bytes, dtype=torch.uint8, device=self.comm.device)
        return _Unpacking(self, wire, self.gathers.issue(lambda: self._send(wire)))

    @torch.no_grad()
    def _send(self, wire: Tensor) -> Work:
        mine, length = wire[self.comm.rank], self.layout.shard_length
        spans = self.layout.spans
        # Cast as modules would find them without this: first to bf16.
        pieces = [self.master[begin:end].to(self.param_dtype) for begin, end in spans]
        zero = self.master.new_zeros((), dtype=self.param_dtype)
        largest = [torch.linalg.vector_norm(piece, math.inf) if piece.numel() else zero for piece in pieces]
        scales, inverses = scales_of(torch.stack(largest), E4M3)
        for (begin, end), piece, scale in zip(spans, pieces, scales.unbind(), strict=True):
            mine[begin:end] = round_to(piece, scale, E4M3).view(torch.uint8)
        mine[length : length + _SCALE * len(spans)].view(torch.float32).copy_(inverses)
        return self.comm.all_gather(wire, mine)

    @torch.no_grad()
    def unpack(self, wire: Tensor) -> None:
        full = self.full.data  # see ``FlatGroup.gather``
        length = self.layout.shard_length
        for rank, row in enumerate(wire):
            first, last = self.layout.shard_range(rank, self.comm.size)
            numbers = row[:length].view(E4M3)
            inverses = row[length : length + _SCALE * len(self.layout.names)].view(torch.float32).to(self.param_dtype)
            for slot, inverse in zip(self.layout.slots, inverses.unbind(), strict=True):
                begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
                if begin < end:
                    sent = numbers[begin - first : end - first].to(self.param_dtype)
                    torch.mul(sent, inverse, out=full[begin:end])


@dataclass(slots=True)
class _Unpacking:
    """A gather in flight whose bytes become parameters when it is waited for."""

    group: Float8Group
    wire: Tensor | None
    work: Work

    def wait(self) -> None:
        """Waits for the bytes, and turns them into parameters. Safe to call twice."""
        self.work.wait()
        if self.wire is not None:
            self.group.unpack(self.wire)
            self.wire = None
