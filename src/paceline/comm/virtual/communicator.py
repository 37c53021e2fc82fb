"""N ranks as threads of one process, on a CPU or on one CUDA device: real numerics, no network.

The ranks run one at a time (see ``baton.py``). A collective is carried out by the rank that arrives last, and sums are
taken in rank order, in float32 where the tensors are narrower: results are bit-for-bit the same on every run. Ranks
that call different operations get an error that names them and what each called; ranks that wait for what will not
come get a verdict, never a silent hang.

    results = run_virtual(work, ranks=4)      # work(comm) on each rank; what they returned, by rank

With ``timing`` every rank has a clock of its own (see ``clock.py``), ``comm.clock``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from paceline.comm.base import ReduceOp, Splits, Work
from paceline.comm.group import (
    NARROW,
    GroupMember,
    all_to_all_splits,
    check_peer,
    check_pieces,
    check_split,
    reduce_pair,
)
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
        pairing.enter(rank)
        with contextlib.nullcontext() if comm.clock is None else comm.clock.running():
            return work(comm)

    with pairing.following() if ranks > 1 else contextlib.nullcontext():
        return baton.run([lambda rank=rank: live(rank) for rank in range(ranks)])  # type: ignore[misc]


class VirtualCommunicator(GroupMember):
    """One virtual rank's handle on a group."""

    takes_real_time = False  # a rank that waits for another waits for all that take their turns before it
    clock: VirtualClock | None

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        super().__init__(rank, group.ranks, group.world.baton.device, backend="virtual")
        self.clock = group.world.clock(group.ranks[rank])
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        def carry_out(contributions: list[Contribution]) -> None:
            result = _reduce([a.tensors[0] for a in contributions], op)
            for each in contributions:
                each.tensors[0].data.copy_(result)

        return self._meet("all_reduce", op, carry_out, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_pieces("reduce_scatter", whole=tensor, piece=output, size=self.size)

        def carry_out(contributions: list[Contribution]) -> None:
            result = _reduce([a.tensors[1] for a in contributions], op).view(len(contributions), -1)
            for piece, each in zip(result, contributions, strict=True):
                each.tensors[0].data.view(-1).copy_(piece)

        return self._meet("reduce_scatter", op, carry_out, output, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        check_pieces("all_gather", whole=output, piece=tensor, size=self.size)

        def carry_out(contributions: list[Contribution]) -> None:
            whole = torch.cat([a.tensors[1].reshape(-1) for a in contributions])
            for each in contributions:
                each.tensors[0].data.view(-1).copy_(whole)

        return self._meet("all_gather", "", carry_out, output, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        check_peer("broadcast from", source, self.size)

        def carry_out(contributions: list[Contribution]) -> None:
            for rank, each in enumerate(contributions):
                if rank != source:
                    each.tensors[0].data.copy_(contributions[source].tensors[0])

        return self._meet("broadcast", f"source={source}", carry_out, tensor)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Splits = None, input_splits: Splits = None
    ) -> Work:
        """Sends the i-th piece of ``tensor`` to rank i; what each pair exchanges must agree on both sides."""
        splits = (
            all_to_all_splits(output, output_splits, self.size),
            all_to_all_splits(tensor, input_splits, self.size),
        )
        call = VirtualCall("all_to_all", f"{_dtype(tensor)} rows of {list(tensor.shape[1:])}", _caller())
        return self._group.meet(self.rank, Contribution(call, (output, tensor), splits), self._exchange)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Sends ``tensor``; done when the receive is there, so that an unmatched send is found."""
        check_peer("send to", to, self.size)
        return self._post("send", f"to {self.ranks[to]}", tensor, (self.rank, to, tag))

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        check_peer("recv from", source, self.size)
        return self._post("recv", f"from {self.ranks[source]}", tensor, (source, self.rank, tag))

    def barrier(self) -> None:
        self._meet("barrier", "", lambda _: None).wait()

    def split(self, ranks: Sequence[int]) -> VirtualCommunicator:
        check_split(ranks, self.rank, self.size)
        members = tuple(self.ranks[r] for r in ranks)
        group = self._group.world.join(members, self.ranks[self.rank])
        return VirtualCommunicator(group, list(ranks).index(self.rank))

    def _meet(
        self, kind: str, detail: str, carry_out: Callable[[list[Contribution]], None], *tensors: torch.Tensor
    ) -> Work:
        parts = [detail, *(_shape(t) for t in tensors)]
        call = VirtualCall(kind, ", ".join(part for part in parts if part), _caller())
        return self._group.meet(self.rank, Contribution(call, tensors), carry_out)

    def _post(self, kind: str, peer: str, tensor: torch.Tensor, key: tuple[int, int, int]) -> Work:
        detail = f"rank {self.ranks[self.rank]} {peer}, {_shape(tensor)}, tag={key[2]}"
        message = Contribution(VirtualCall(kind, detail, _caller()), (tensor,))
        return self._group.post(message, key, is_send=kind == "send")

    def _exchange(self, contributions: list[Contribution]) -> None:
        pieces = [torch.split(a.tensors[1].clone(), a.splits[1]) for a in contributions if a.splits is not None]
        for me, each in enumerate(contributions):
            assert each.splits is not None
            for peer, target in enumerate(torch.split(each.tensors[0].data, each.splits[0])):
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


def _caller() -> str:
    return call_site(sys._getframe(1))
