"""N ranks as threads of one process, on a CPU or on one CUDA device: real numerics, no network.

The ranks run one at a time (see ``baton.py``). A collective is carried out by the rank that arrives last, and sums are
taken in rank order, in float32 where the tensors are narrower: results are bit-for-bit the same on every run. Ranks
that call different operations, or wait for what will not come, get an error that says so, never a silent hang.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.comm.base import NARROW, Call, Communicator, ReduceOp, Work, check_split, reduce_pair
from paceline.comm.virtual.baton import Baton, call_site
from paceline.comm.virtual.clock import VirtualClock, VirtualTime
from paceline.comm.virtual.group import Contribution, VirtualCall, VirtualGroup, VirtualPairing, VirtualWorld
from paceline.errors import CollectiveMismatchError, UsageError

T = TypeVar("T")


def run_virtual(
    work: Callable[[VirtualCommunicator], T],
    ranks: int,
    *,
    device: str | torch.device = "cpu",
    timeout_s: float = 60.0,
    seed: int = 0,
    timing: VirtualTime | None = None,
) -> list[T]:
    """Runs ``work(comm)`` on each of ``ranks`` virtual ranks and returns what they returned, by rank.

    Every rank starts with the random states of a process just seeded with ``seed``; the caller's are left as they
    were. ``timeout_s`` limits how long a rank may go without calling its communicator. ``timing`` gives every rank a
    clock, and says what things cost there; results are the same with it and without.

    Raises RankFailedError with a failing rank's traceback, CollectiveMismatchError, or StuckRankError.
    """
    if ranks < 1:
        raise UsageError(f"ranks = {ranks}: at least one virtual rank is needed")
    where = torch.device(device)
    if str(where) == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    baton = Baton(ranks, where, timeout_s=timeout_s, seed=seed)
    if timing is not None:
        timing.start(ranks, where)
    world = VirtualWorld(baton, timing)
    pairing = VirtualPairing(world.everybody)

    def live(rank: int) -> T:
        comm = VirtualCommunicator(world.join(world.everybody.ranks, rank), rank)
        comm.trained = pairing.trained[rank]
        pairing.thread.rank = rank
        with contextlib.nullcontext() if comm.clock is None else comm.clock.running():
            return work(comm)

    hook = register_optimizer_step_post_hook(pairing.end_update)
    try:
        return baton.run([partial(live, rank) for rank in range(ranks)])
    finally:
        hook.remove()


class VirtualCommunicator(Communicator):
    """One virtual rank's handle on a group."""

    takes_real_time = False  # a rank that waits for another waits for all that take their turns before it
    clock: VirtualClock | None

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        super().__init__(rank, group.ranks, group.world.baton.device, backend="virtual")
        self.clock = group.world.clock(group.ranks[rank])
        self._group = group

    def issue(self, call: Call) -> Work:
        """Joins a collective, or posts a message: a send is done when its receive is there, so none goes unmatched."""
        kind, peer, tag = call.kind, call.peer, call.tag
        if kind in ("send", "recv"):
            is_send = kind == "send"
            other = f"{'to' if is_send else 'from'} {self.ranks[peer]}"
            detail = f"rank {self.ranks[self.rank]} {other}, {_shape(call.tensor)}, tag={tag}"
            message = Contribution(VirtualCall(kind, detail, call_site(sys._getframe())), (call.tensor,))
            key = (self.rank, peer, tag) if is_send else (peer, self.rank, tag)
            return self._group.post(message, key, is_send=is_send)
        tensors = (call.tensor,) if call.output is call.tensor else (call.output, call.tensor)
        if kind == "all_to_all":
            detail = f"{_dtype(call.tensor)} rows of {list(call.tensor.shape[1:])}"
        else:
            first = {"all_gather": "", "broadcast": f"source={peer}"}.get(kind, call.op)
            detail = ", ".join(part for part in (first, *map(_shape, tensors)) if part)
        asked = VirtualCall(kind, detail, call_site(sys._getframe()))
        return self._group.meet(self.rank, Contribution(asked, tensors, call.splits), partial(self._carry_out, call))

    def barrier(self) -> None:
        call = VirtualCall("barrier", "", call_site(sys._getframe()))
        self._group.meet(self.rank, Contribution(call, ()), lambda _: None).wait()

    def split(self, ranks: Sequence[int]) -> VirtualCommunicator:
        check_split(ranks, self.rank, self.size)
        members = tuple(self.ranks[r] for r in ranks)
        group = self._group.world.join(members, self.ranks[self.rank])
        return VirtualCommunicator(group, list(ranks).index(self.rank))

    def _carry_out(self, call: Call, contributions: list[Contribution]) -> None:
        outputs = [each.tensors[0].data for each in contributions]
        given = [each.tensors[-1] for each in contributions]
        if call.kind == "all_reduce":
            result = _reduce(given, call.op)
            for output in outputs:
                output.copy_(result)
        elif call.kind == "reduce_scatter":
            for piece, output in zip(_reduce(given, call.op).view(len(given), -1), outputs, strict=True):
                output.view(-1).copy_(piece)
        elif call.kind == "all_gather":
            whole = torch.cat([tensor.reshape(-1) for tensor in given])
            for output in outputs:
                output.view(-1).copy_(whole)
        elif call.kind == "broadcast":
            for rank, output in enumerate(outputs):
                if rank != call.peer:
                    output.copy_(given[call.peer])
        else:
            self._exchange(outputs, given, [each.splits for each in contributions if each.splits is not None])

    def _exchange(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], splits: list[tuple[list[int], list[int]]]
    ) -> None:
        """Hands pieces over; what each pair exchanges must agree on both sides."""
        pieces = [torch.split(tensor.clone(), ours) for tensor, (_, ours) in zip(given, splits, strict=True)]
        for me, output in enumerate(outputs):
            for peer, target in enumerate(torch.split(output, splits[me][0])):
                piece = pieces[peer][me]
                if piece.shape != target.shape:
                    self._group.world.baton.fail(
                        CollectiveMismatchError(
                            f"all_to_all: rank {self.ranks[peer]} sends {list(piece.shape)} to rank {self.ranks[me]}, "
                            f"which expects {list(target.shape)}\n  input_splits[{me}] of the one must be "
                            f"output_splits[{peer}] of the other"
                        )
                    )
                target.copy_(piece)


def _reduce(tensors: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    dtype = tensors[0].dtype
    total = tensors[0].detach().to(torch.float32 if dtype in NARROW else dtype, copy=True)
    for tensor in tensors[1:]:
        reduce_pair(total, tensor, op, out=total)
    if op == "avg":
        total /= len(tensors)
    return total


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}"
