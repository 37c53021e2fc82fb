"""N ranks as threads of one process, on a CPU or on one CUDA device: real numerics, no network.

The ranks run one at a time (see ``baton.py``). A collective is carried out by the rank that arrives last, and sums are
taken in rank order, in float32 where the tensors are narrower: results are bit-for-bit the same on every run. On CUDA
each side's stream is ordered after the others' by events. Operations of a group are matched by the order in which each
member issued them, messages by their two ranks and tag. Ranks that call different operations, wait for what will not
come, or are in different steps at an update of what they train (``health/pairing.py``), get an error that says so.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.comm.base import NARROW, Call, Communicator, ReduceOp, Work, check_split, reduce_pair
from paceline.comm.ledger.call_sites import user_line
from paceline.comm.ledger.ledger import TrainedParameters, UpdateNotes
from paceline.comm.virtual.baton import Baton, BatonWait, call_site
from paceline.comm.virtual.clock import VirtualClock, VirtualTime
from paceline.errors import CollectiveMismatchError, UsageError
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.pairing import PairedRanks, Update, pairing_verdict
from paceline.health.verdict import find_hang

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

    Every rank starts with the random states of a process just seeded with ``seed``; the caller's are left as they were.
    ``timeout_s`` limits how long a rank may go without calling its communicator. ``timing`` gives every rank a clock.
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
        pieces = [torch.split(tensor.clone(), ours) for tensor, (_, ours) in zip(given, splits, strict=True)]
        for me, output in enumerate(outputs):
            for peer, target in enumerate(torch.split(output, splits[me][0])):
                piece = pieces[peer][me]
                if piece.shape != target.shape:
                    what = (
                        f"all_to_all: rank {self.ranks[peer]} sends {list(piece.shape)} to rank {self.ranks[me]}, "
                        f"which expects {list(target.shape)}\n  input_splits[{me}] of the one must be "
                        f"output_splits[{peer}] of the other"
                    )
                    self._group.world.baton.fail(CollectiveMismatchError(what))
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


@dataclass(frozen=True, slots=True)
class VirtualCall:
    """What one rank asked for, as far as all ranks must agree on it; ``where`` is for the message alone."""

    kind: str
    detail: str
    where: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind}({self.detail}) at {self.where}"


@dataclass(slots=True)
class Contribution:
    """What one rank brings to an operation: its tensors, and when they are ready, on its stream and on its clock."""

    call: VirtualCall
    tensors: tuple[torch.Tensor, ...]
    splits: tuple[list[int], list[int]] | None = None
    ready: torch.cuda.Event | None = None
    at_s: float = 0.0


@dataclass(slots=True)
class _Operation:
    """A collective, by rank, or a message, by whether it is the send: what has arrived for it, and how it ended."""

    contributions: dict[int, Contribution] = field(default_factory=dict)
    is_done: bool = False
    done: torch.cuda.Event | None = None
    end_s: float = 0.0


class VirtualWorld:
    """Everything that virtual ranks share: the baton, their time if they have one, and groups by their members."""

    def __init__(self, baton: Baton, timing: VirtualTime | None) -> None:
        self.baton, self.timing = baton, timing
        baton.explain = self._explain
        self.everybody = VirtualGroup(self, tuple(range(baton.num_ranks)))
        self._groups: dict[tuple[int, ...], list[VirtualGroup]] = {self.everybody.ranks: [self.everybody]}
        self._joined: Counter[tuple[tuple[int, ...], int]] = Counter()

    def join(self, ranks: tuple[int, ...], world_rank: int) -> VirtualGroup:
        """Gives a member its n-th group of these ranks: the same object to all of them."""
        made, number = self._groups.setdefault(ranks, []), self._joined[ranks, world_rank]
        self._joined[ranks, world_rank] += 1
        if number == len(made):
            made.append(VirtualGroup(self, ranks))
        return made[number]

    def name(self, group: VirtualGroup) -> GroupName:
        return GroupName(group.ranks, self._groups[group.ranks].index(group))

    def _explain(self, waits: Mapping[int, LedgerEntry], finished: set[int]) -> str:
        """Says why no rank can go on: ``waits`` is what ranks are in, and the others have finished."""
        issued: dict[int, dict[GroupName, int]] = {rank: {} for rank in range(self.baton.num_ranks)}
        for group in (each for made in self._groups.values() for each in made):
            for rank, count in zip(group.ranks, group.issued, strict=True):
                issued[rank][self.name(group)] = count
        views = [
            LedgerView(
                rank=rank,
                state="finished" if rank in finished else "running",
                entries=(waits[rank],) if rank in waits else (),
                issued=counts,
                waiting=waits[rank].number if rank in waits else None,
            )
            for rank, counts in issued.items()
        ]
        return find_hang(views, 0.0).sentence

    def clock(self, world_rank: int) -> VirtualClock | None:
        return None if self.timing is None else self.timing.clocks[world_rank]

    def paused(self, world_rank: int) -> contextlib.AbstractContextManager[None]:
        clock = self.clock(world_rank)
        return contextlib.nullcontext() if clock is None else clock.paused()

    def stream_point(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream().record_event() if self.baton.device.type == "cuda" else None


class VirtualGroup:
    def __init__(self, world: VirtualWorld, ranks: tuple[int, ...]) -> None:
        self.world, self.ranks = world, ranks
        self.issued = [0] * len(ranks)
        self.last_calls: list[VirtualCall | None] = [None] * len(ranks)
        self._collectives: dict[int, _Operation] = {}
        self._messages: dict[tuple[int, int, int, bool], deque[_Operation]] = {}  # sends and receives without a match
        self._free_s: dict[tuple[int, ...], float] = {}  # when the last one ends, of collectives () or of a pair

    def meet(self, rank: int, contribution: Contribution, carry_out: Callable[[list[Contribution]], None]) -> Work:
        """Adds a rank to its next collective; the last one to arrive carries it out."""
        world_rank = self.ranks[rank]
        with self.world.paused(world_rank):
            self._arrive(world_rank, contribution)
            number = self.issued[rank]
            self.issued[rank] += 1
            self.last_calls[rank] = contribution.call
            collective = self._collectives.setdefault(number, _Operation())
            collective.contributions[rank] = contribution
            if contribution.call != next(iter(collective.contributions.values())).call:
                self.world.baton.fail(CollectiveMismatchError(self._describe_mismatch(number, collective)))
            if len(collective.contributions) == len(self.ranks):
                del self._collectives[number]
                arrived = [collective.contributions[r] for r in range(len(self.ranks))]
                self._end(collective, lambda: carry_out(arrived), self.ranks, contribution.call.kind)
            return _VirtualWork(
                lambda: collective.is_done,
                lambda: self._describe(number, collective),
                lambda: self._entry(contribution.call, number),
                *(self.world, world_rank, collective, contribution.call.kind),
            )

    def post(self, message: Contribution, key: tuple[int, int, int], *, is_send: bool) -> Work:
        """Matches a send with the oldest receive of the same two ranks and tag, or the other way round."""
        source, to, tag = self.ranks[key[0]], self.ranks[key[1]], key[2]
        rank, peer = (source, to) if is_send else (to, source)
        with self.world.paused(rank):
            self._arrive(rank, message)
            waiting = self._messages.get((*key, not is_send))
            operation = waiting.popleft() if waiting else _Operation()
            operation.contributions[is_send] = message
            if len(operation.contributions) == 2:
                self._end(operation, lambda: self._deliver(operation), (source, to), "send")
            else:
                self._messages.setdefault((*key, is_send), deque()).append(operation)
            return _VirtualWork(
                lambda: operation.is_done,
                lambda: f"rank {peer} to match {message.call}",
                lambda: self._entry(message.call, 0, peer=peer, tag=tag),
                *(self.world, rank, operation, message.call.kind),
            )

    def _arrive(self, rank: int, contribution: Contribution) -> None:
        clock = self.world.clock(rank)
        if clock is not None:
            contribution.at_s = clock.now_s
        self.world.baton.sign_of_life()
        contribution.ready = self.world.stream_point()

    def _end(self, operation: _Operation, carry_out: Callable[[], None], ranks: tuple[int, ...], kind: str) -> None:
        """Carries out an operation and prices it, from the latest arrival on, or from the end of the one before it."""
        contributions = operation.contributions.values()
        for each in contributions:
            if each.ready is not None:
                torch.cuda.current_stream().wait_event(each.ready)
        with torch.no_grad():
            carry_out()
        timing = self.world.timing
        if timing is not None:
            lane = ranks if kind == "send" else ()
            start_s = max(self._free_s.get(lane, 0.0), *(each.at_s for each in contributions))
            # Of output and input the larger is the whole; ranks exchange different amounts in an all-to-all at most.
            num_bytes = max((tensor.nbytes for each in contributions for tensor in each.tensors), default=0)
            operation.end_s = self._free_s[lane] = timing.carry_out(kind, num_bytes, ranks, start_s)
        operation.is_done, operation.done = True, self.world.stream_point()
        operation.contributions = {}  # lets go of the tensors

    def _deliver(self, operation: _Operation) -> None:
        sent, received = operation.contributions[True], operation.contributions[False]
        (source,), (target,) = sent.tensors, received.tensors
        if source.shape != target.shape or source.dtype != target.dtype:
            what = f"a send and its receive differ\n  {sent.call}\n  {received.call}"
            self.world.baton.fail(CollectiveMismatchError(what))
        target.data.copy_(source.data)

    def _entry(self, call: VirtualCall, number: int, *, peer: int | None = None, tag: int = 0) -> LedgerEntry:
        asked = LedgerCall(kind=call.kind, op="" if peer is not None else call.detail, peer=peer, tag=tag)
        return LedgerEntry(number=1, group=self.world.name(self), sequence=number, call=asked, site=call.where)

    def _describe(self, number: int, collective: _Operation) -> str:
        call = next(iter(collective.contributions.values())).call
        return f"{_ranks(self._missing(collective))} in operation {number} of group {list(self.ranks)}: {call}"

    def _missing(self, collective: _Operation) -> list[int]:
        return [rank for place, rank in enumerate(self.ranks) if place not in collective.contributions]

    def _describe_mismatch(self, number: int, collective: _Operation) -> str:
        by_call: dict[VirtualCall, list[int]] = {}
        for rank, contribution in sorted(collective.contributions.items()):
            by_call.setdefault(contribution.call, []).append(self.ranks[rank])
        lines = [f"  {_ranks(ranks)} called {call}" for call, ranks in by_call.items()]
        if missing := self._missing(collective):
            lines.append(f"  {_ranks(missing)} had not arrived")
        head = f"ranks of group {list(self.ranks)} called different operations (operation {number} of the group)"
        rule = "  every rank of a group issues the same operations in the same order, with the same shapes and dtypes"
        return "\n".join([head, *lines, rule])


@dataclass(frozen=True, slots=True)
class _VirtualWork(BatonWait):
    world: VirtualWorld
    rank: int
    operation: _Operation
    kind: str

    def wait(self) -> None:
        with self.world.paused(self.rank):
            self.world.baton.wait(self.rank, self)
            if self.operation.done is not None:
                torch.cuda.current_stream().wait_event(self.operation.done)
            clock = self.world.clock(self.rank)
            if clock is not None:
                clock.wait_until(self.operation.end_s, self.kind)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


_MOST_KEPT = 32  # updates of a rank: neighbours are never further apart


class VirtualPairing:
    """Compares the updates of virtual ranks; ``group`` is all of them."""

    def __init__(self, group: VirtualGroup) -> None:
        self.trained = [TrainedParameters() for _ in group.ranks]
        self._group = group
        self._notes = [UpdateNotes(seldom_s=0.0) for _ in group.ranks]
        self._made: list[dict[int, tuple[Update, LedgerEntry]]] = [{} for _ in group.ranks]  # by collectives
        self._pairs = [PairedRanks() for _ in group.ranks[1:]]  # each rank with the one after it
        self.thread = threading.local()  # its ``rank``

    def end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Compares an update with the neighbours' of this thread's rank. A hook of every optimizer."""
        rank = getattr(self.thread, "rank", None)
        if rank is not None and self._pairs and self.trained[rank].are_updated_by(optimizer):
            with self._group.world.paused(rank):
                if self._notes[rank].count(self._group.issued[rank]):
                    self._compare(rank, sys._getframe(1))

    def _compare(self, rank: int, frame: FrameType) -> None:
        own, called, made = self._notes[rank].note(0, frame), self._group.last_calls[rank], self._made[rank]
        assert called is not None
        made[own.collectives] = (
            own,
            LedgerEntry(
                number=0,
                group=GroupName(self._group.ranks),
                sequence=self._group.issued[rank] - 1,
                call=LedgerCall(kind=called.kind, op=called.detail),
                site=f"{called.where}, before the update at {user_line(frame) or 'an unknown line'}",
            ),
        )
        if len(made) > _MOST_KEPT:
            del made[next(iter(made))]
        for low, high in ((rank - 1, rank), (rank, rank + 1)):
            if low < 0 or high == len(self._made):
                continue
            both = self._made[low].get(own.collectives), self._made[high].get(own.collectives)
            if both[0] is None or both[1] is None:
                continue
            found = self._pairs[low].compare(both[0][0], both[1][0])
            if found is not None:
                name = self._notes[rank].name_of(found.counter)
                verdict = pairing_verdict(found, (low, high), (both[0][1], both[1][1]), name)
                raise CollectiveMismatchError(verdict.sentence)
