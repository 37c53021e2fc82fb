"""Reduce-scatter, all-gather and small all-reduces as messages between all pairs of ranks, for Gloo.

    reduce-scatter   every rank sends each other one the slice that it owns, and adds up what it gets, in rank order
    all-gather       every rank sends its piece to each other one, straight to its place
    all-reduce       of two ranks, if small: each sends the other all of it; one way instead of a ring's two

For a tensor of B bytes a rank sends B (N-1)/N bytes in N-1 messages. Gloo itself has no reduce-scatter: torch makes one
from a copy and an all-reduce, which moves twice as much; and its all-gather copies everything once more. Messages make
their way in Gloo's own thread; the sum is taken by the rank that waits.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.base import ReduceOp
from paceline.comm.group import reduce_in_order
from paceline.shards import round_up

# Far from the tags of users: a reduce-scatter and a gather of two ranks are matched by tag, then by order.
_SLICE_TAG = 2**30
_PIECE_TAG = 2**30 + 1
_WHOLE_TAG = 2**30 + 2
_WORD = 16  # bytes: memory of any dtype is made of whole ones


class _Scratch:
    """Memory for what arrives. Two pieces of it stay: to touch new memory costs as much as to fill it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for ``numel`` elements, at least."""
        num_bytes = numel * dtype.itemsize
        for piece in self._free:
            if piece.numel() >= num_bytes:
                self._free.remove(piece)
                return piece.view(dtype)
        return torch.empty(round_up(num_bytes, _WORD), dtype=torch.uint8).view(dtype)

    def give_back(self, piece: torch.Tensor) -> None:
        """Keeps memory for the next one, if it is among the two largest."""
        self._free = sorted([*self._free, piece.view(torch.uint8)], key=lambda each: -each.numel())[:2]


@dataclass(slots=True, eq=False)
class ExchangeWork:
    """Messages in flight, and what is done with them when all have come."""

    receives: list[Any]
    sends: list[Any]
    timeout: datetime.timedelta
    combine: Callable[[], None] | None = None

    def wait(self) -> None:
        """Returns when everything has come, is added up, and has left. Safe to call twice."""
        for work in self.receives:
            work.wait(self.timeout)
        if self.combine is not None:
            self.combine()
        for work in self.sends:
            work.wait(self.timeout)
        self.receives, self.sends, self.combine = [], [], None


class GlooExchanges:
    """The collectives of one rank of a Gloo group, on flat tensors."""

    def __init__(self, group: Any, rank: int, size: int, timeout_s: float) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._others = [(rank + step) % size for step in range(1, size)]  # its neighbour first: not all to the same one
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._scratch = _Scratch()

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, op: ReduceOp) -> ExchangeWork:
        """Reduces the ranks' ``whole`` tensors, of floating point, to this rank's slice of the result."""
        length, is_first = output.numel(), self._rank == 0
        pieces = list(whole.view(self._size, length))
        memory = self._scratch.take((self._size - 1) * length, whole.dtype)
        slices = list(pieces)
        for place, other in enumerate(self._others):
            slices[other] = memory[place * length : (place + 1) * length]
        receives = [self._group.recv([slices[other]], other, _SLICE_TAG) for other in self._others]
        sends = [self._group.send([pieces[other]], other, _SLICE_TAG) for other in self._others]

        def combine() -> None:
            _combine(slices, output, op, is_first=is_first)
            self._scratch.give_back(memory)

        return ExchangeWork(receives, sends, self._timeout, combine)

    def all_gather(self, whole: torch.Tensor, piece: torch.Tensor) -> ExchangeWork:
        """Puts every rank's ``piece`` into its place in ``whole``."""
        places = list(whole.view(self._size, piece.numel()))
        if places[self._rank].data_ptr() != piece.data_ptr():
            places[self._rank].copy_(piece)
        receives = [self._group.recv([places[other]], other, _PIECE_TAG) for other in self._others]
        sends = [self._group.send([piece], other, _PIECE_TAG) for other in self._others]
        return ExchangeWork(receives, sends, self._timeout)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> ExchangeWork:
        """Replaces a small ``tensor`` by the reduction over two ranks."""
        arriving, (other,), is_first = torch.empty_like(tensor), self._others, self._rank == 0
        receive = self._group.recv([arriving], other, _WHOLE_TAG)
        send = self._group.send([tensor], other, _WHOLE_TAG)

        def combine() -> None:
            send.wait(self._timeout)  # what leaves is overwritten
            _combine([tensor, arriving] if is_first else [arriving, tensor], tensor, op, is_first=is_first)

        return ExchangeWork([receive], [], self._timeout, combine)


def _combine(slices: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp, *, is_first: bool) -> None:
    """Reduces the slices in rank order into ``output``, which may be this rank's own one.

    That one is read only, until the last step: the others' are free to hold what has been summed so far.
    """
    free = slices[1] if is_first else slices[0]
    reduce_in_order(
        slices, op, output, lambda dtype: free if dtype == free.dtype else torch.empty_like(free, dtype=dtype)
    )
