"""Tokens for heads, and back: the collective of Ulysses, with its gradient, and what is made of it.

With l tokens of H heads on each of U ranks, a rank has U l tokens of H / U heads afterwards. It sends what it holds but
for its own part, (U-1)/U; and as much in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.comm.base import Communicator, unwatched

Counts: TypeAlias = Sequence[Sequence[int]]  # of each tensor, how many tokens each rank has


def exchange(comm: Communicator, counts: Counts, *tensors: Tensor, to_heads: bool) -> tuple[Tensor, ...]:
    """Returns tensors (batch, heads, tokens, width) with the tokens of all ranks in order, and some of the heads.

    Without ``to_heads`` it is the way back: to a rank's own tokens of all heads.
    """
    if comm.size == 1:
        return tensors
    made: tuple[Tensor, ...] = _Exchange.apply(comm, counts, to_heads, *tensors)  # type: ignore[no-untyped-call]
    return made


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, counts: Counts, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.given = comm, counts, not to_heads
        started = [_start(comm, each, to_heads, tensor) for each, tensor in zip(counts, tensors, strict=True)]
        return tuple(finish() for finish in started)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        comm, counts, to_heads = ctx.given
        return None, None, None, *exchange(comm, counts, *gradients, to_heads=to_heads)


def _start(comm: Communicator, counts: Sequence[int], to_heads: bool, tensor: Tensor) -> Callable[[], Tensor]:
    batch, heads, _, width = tensor.shape
    pieces = tensor.chunk(comm.size, 1) if to_heads else torch.split(tensor, list(counts), 2)
    arriving = counts if to_heads else [counts[comm.rank]] * comm.size
    shapes = [(batch, heads // comm.size if to_heads else heads, each, width) for each in arriving]
    sent, sizes = torch.cat([each.reshape(-1) for each in pieces]), list(map(prod, shapes))
    received = sent.new_empty(sum(sizes))
    with unwatched():
        work = comm.all_to_all(received, sent, sizes, [each.numel() for each in pieces])

    def finish() -> Tensor:
        with unwatched():
            work.wait()
        parts = [each.view(shape) for each, shape in zip(torch.split(received, sizes), shapes, strict=True)]
        return torch.cat(parts, 2 if to_heads else 1)

    return finish


def gather_tokens(comm: Communicator, counts: Sequence[int], tensor: Tensor, dim: int) -> Tensor:
    """Returns the tokens of all ranks along ``dim``, in their order; gradients add up over ranks.

    Each rank sends what it holds to each other one. Ranks have different numbers of tokens, and no all-gather takes
    pieces of different sizes.
    """
    first = tensor.movedim(dim, 0)
    (whole,) = exchange(comm, [counts], first.reshape(1, 1, len(first), -1).expand(1, comm.size, -1, -1), to_heads=True)
    return whole.reshape(-1, *first.shape[1:]).movedim(0, dim)


def pick_tokens(tensor: Tensor, dim: int, places: Tensor) -> Tensor:
    """Returns tokens along ``dim``: the same of all rows of a batch, or (batch, tokens) of each its own."""
    places = places.to(tensor.device)
    if places.dim() == 1:
        return tensor.index_select(dim, places)
    return torch.stack([row.index_select(dim - 1, each) for row, each in zip(tensor, places, strict=True)])
