"""What communicators have in common beside their verbs: how one wraps another, and how two values add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.comm.base import Call, Communicator, ReduceOp, Work
from paceline.errors import UsageError


class WrappedCommunicator(Communicator):
    """Passes every call on to ``inner``. Subclasses add what they are for, in ``issue``."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.ranks, inner.device, backend=inner.backend)
        self.inner = inner
        self.device_kind = inner.device_kind
        self.takes_real_time = inner.takes_real_time
        self.clock, self.ledger, self.trace = inner.clock, inner.ledger, inner.trace
        self.trained = inner.trained

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self.inner.shared_buffer(numel, dtype)

    def issue(self, call: Call) -> Work:
        return self.inner.issue(call)

    def barrier(self) -> None:
        self.inner.barrier()


def check_reduction(kind: str, dtype: torch.dtype, op: ReduceOp) -> None:
    """Raises UsageError for a mean of whole numbers and for the smallest or largest of complex ones."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"{kind}: avg of {dtype}: a mean of whole numbers is not one\n"
            "  take 'sum' in place of 'avg', or convert to floats first"
        )
    if op in ("min", "max") and dtype.is_complex:
        raise UsageError(f"{kind}: {op} of {dtype}: complex numbers have no order")


NARROW = (torch.float16, torch.bfloat16)  # added up in float32, so that a sum is rounded once


def reduce_pair(one: torch.Tensor, other: torch.Tensor, op: ReduceOp, out: torch.Tensor) -> None:
    """Puts the sum (also of a mean, which is divided at the end), the smaller or the larger of two into ``out``."""
    if op in ("sum", "avg"):
        torch.add(one, other, out=out)
    else:
        (torch.minimum if op == "min" else torch.maximum)(one, other, out=out)


def reduce_in_order(
    pieces: Sequence[torch.Tensor], op: ReduceOp, output: torch.Tensor, scratch: Callable[[torch.dtype], torch.Tensor]
) -> None:
    """Reduces pieces in rank order into ``output``, which may be one of them: that one is read before it is written.

    ``scratch`` gives memory of a dtype for what has been added up so far.
    """
    if output.dtype in NARROW:
        total = scratch(torch.float32).copy_(pieces[0])
        for piece in pieces[1:]:
            reduce_pair(total, piece, op, total)
        if op == "avg":
            total.div_(len(pieces))
        output.copy_(total)
        return
    total = pieces[0]
    for piece in pieces[1:-1]:
        sums = scratch(output.dtype)
        reduce_pair(total, piece, op, sums)
        total = sums
    reduce_pair(total, pieces[-1], op, output)
    if op == "avg":
        output.div_(len(pieces))
