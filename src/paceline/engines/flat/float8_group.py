"""A flat group that travels with 8 bits a number: weights of linear layers that read no more of them.

    wire      | rank 0: its slice in e4m3, its scales | rank 1: its slice, its scales | ...          1 byte a number
    full      | weight ............ | pad | weight .................. | pad |                        bf16, as ever

Half of what bf16 would send. Each rank casts its slice with scales of its own, one for each weight that it has a part
of, and sends them along: no rank waits to learn a maximum of all. What arrives is put back as bf16, which is exact, so
that modules, checkpointing and compiled code find parameters as they know them. A layer that casts them again finds
the same 8 bits: scales are powers of two (see [Note: powers of two] in ``engines/float8.py``).
"""

from __future__ import annotations

import math

import torch

from paceline.comm.base import Work
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.float8 import E4M3, round_to, scales_of

_ALIGN = 32  # bytes, as the slices are
_SCALE = 4  # bytes


class Float8Group(FlatGroup):
    """Weights whose slices are gathered in e4m3. Masters, gradients and what modules see are those of any group."""

    def gather(self) -> Work:
        if self.comm.size == 1:
            return super().gather()
        self.allocate()
        wire = torch.empty(self.comm.size, self._row_bytes, dtype=torch.uint8, device=self.comm.device)
        return _Unpacking(self, wire, self.gathers.issue(lambda: self._send(wire)))

    @property
    def _row_bytes(self) -> int:
        """What a rank sends: its slice, and the inverse scale of each of its pieces."""
        return self.layout.shard_length + -(-_SCALE * len(self.layout.names) // _ALIGN) * _ALIGN

    @torch.no_grad()
    def _send(self, wire: torch.Tensor) -> Work:
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
    def unpack(self, wire: torch.Tensor) -> None:
        """Fills ``full`` from what all ranks have sent."""
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


class _Unpacking:
    """A gather in flight whose bytes become parameters when it is waited for."""

    def __init__(self, group: Float8Group, wire: torch.Tensor, work: Work) -> None:
        self._group = group
        self._wire: torch.Tensor | None = wire
        self._work = work

    def wait(self) -> None:
        """Waits for the bytes, and turns them into parameters. Safe to call twice."""
        self._work.wait()
        if self._wire is not None:
            self._group.unpack(self._wire)
            self._wire = None
