"""What communicators have in common: membership, what they declare, what their verbs refuse, and how two values add up.

``GroupMember`` is the base of the backends. ``WrappedCommunicator`` is the base of those that add something to another
communicator: it declares what the inner one declares, and passes every verb on through one method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.clock import Clock
from paceline.comm.base import Communicator, ReduceOp, Splits, Work
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.comm.ledger.ledger import Ledger
    from paceline.comm.ledger.updates import TrainedParameters
    from paceline.comm.trace import Trace


class GroupMember:
    """A rank of a group: its number, the ranks of all members in the world, and its device."""

    takes_real_time: bool = True
    clock: Clock | None = None
    ledger: Ledger | None = None
    trained: TrainedParameters | None = None
    trace: Trace | None = None

    def __init__(self, rank: int, ranks: tuple[int, ...], device: torch.device, *, backend: str) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.device = device
        self.device_kind = device.type
        self.backend = backend

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns None: there is no memory that the ranks share."""
        del numel, dtype
        return None


class WrappedCommunicator(GroupMember):
    """Passes every verb on to ``inner``. Subclasses add what they are for, in ``_pass_on`` or in single verbs."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.ranks, inner.device, backend=inner.backend)
        self.inner = inner
        self.device_kind = inner.device_kind
        self.takes_real_time = inner.takes_real_time
        self.clock, self.ledger, self.trace = inner.clock, inner.ledger, inner.trace
        self.trained = inner.trained

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self.inner.shared_buffer(numel, dtype)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self._pass_on("all_reduce", tensor, self.inner.all_reduce, tensor, op)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self._pass_on("reduce_scatter", tensor, self.inner.reduce_scatter, output, tensor, op)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self._pass_on("all_gather", output, self.inner.all_gather, output, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        return self._pass_on("broadcast", tensor, self.inner.broadcast, tensor, source)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Splits = None, input_splits: Splits = None
    ) -> Work:
        return self._pass_on("all_to_all", tensor, self.inner.all_to_all, output, tensor, output_splits, input_splits)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        return self._pass_on("send", tensor, self.inner.send, tensor, to, tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        return self._pass_on("recv", tensor, self.inner.recv, tensor, source, tag)

    def barrier(self) -> None:
        self.inner.barrier()

    def _pass_on(self, kind: str, whole: torch.Tensor, verb: Callable[..., Work], *arguments: object) -> Work:
        """Calls a verb of ``inner``; ``whole`` is the tensor whose bytes count."""
        del kind, whole
        return verb(*arguments)


# What the verbs refuse, on every backend alike: else a mistake would pass on virtual ranks and hang real ones.


def check_peer(kind: str, peer: int, size: int) -> None:
    """Raises UsageError unless ``peer`` is a rank of a group of ``size``."""
    if not 0 <= peer < size:
        raise UsageError(f"{kind} rank {peer} in a group of {size}: its ranks are 0 to {size - 1}")


def check_pieces(kind: str, *, whole: torch.Tensor, piece: torch.Tensor, size: int) -> None:
    """Raises UsageError unless ``whole`` holds one ``piece`` for each rank, of the same dtype."""
    if whole.numel() != piece.numel() * size:
        raise UsageError(
            f"{kind} on {size} ranks with {whole.numel()} elements in all and {piece.numel()} a rank: "
            f"the whole must be {size} times the piece"
        )
    if whole.dtype != piece.dtype:
        raise UsageError(f"{kind} between {whole.dtype} and {piece.dtype}: both tensors have the same dtype")


def all_to_all_splits(tensor: torch.Tensor, splits: Splits, size: int) -> list[int]:
    """Returns the rows of ``tensor`` that belong to each rank; raises UsageError where they do not add up."""
    rows = tensor.shape[0]
    if splits is None and rows % size:
        raise UsageError(f"all_to_all of {rows} rows on {size} ranks: give splits, or rows that divide")
    result = list(splits) if splits is not None else [rows // size] * size
    if len(result) != size or sum(result) != rows or min(result) < 0:
        raise UsageError(f"all_to_all splits {result} do not make {rows} rows on {size} ranks")
    return result


def check_split(ranks: Sequence[int], rank: int, size: int) -> None:
    """Raises UsageError unless ``ranks`` are distinct ranks of a group of ``size``, with ``rank`` among them."""
    if rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < size for r in ranks):
        raise UsageError(
            f"split({list(ranks)}) on rank {rank} of {size}: give distinct ranks of this group, this one among them"
        )


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
