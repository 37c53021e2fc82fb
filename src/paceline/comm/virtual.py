"""N ranks as threads of one process, on a CPU or on one CUDA device: real numerics, no network.

The ranks run one at a time (see ``baton.py``). A collective is carried out by the rank that arrives last, and sums are
taken in rank order, in float32 where the tensors are narrower: results are bit-for-bit the same on every run. Ranks
that call different operations get an error that names them and what each called; ranks that wait for what will not
come get a verdict, never a silent hang.

    results = run_virtual(work, ranks=4)      # work(comm) on each rank; what they returned, by rank

With ``timing`` every rank has a clock of its own (see ``virtual_clock.py``), ``comm.clock``.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from paceline.comm.arguments import all_to_all_splits, check_peer, check_pieces, check_split
from paceline.comm.base import ReduceOp, Work
from paceline.comm.baton import Baton, Wait, call_site
from paceline.comm.virtual_clock import VirtualClock, VirtualTime
from paceline.errors import CollectiveMismatchError, UsageError
from paceline.monitor.ledger_view import Call, Entry, GroupName, LedgerView
from paceline.monitor.verdict import find_hang

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
    world = _World(baton, timing)
    group = world.group(tuple(range(ranks)))

    def live(rank: int) -> T:
        comm = VirtualCommunicator(group, rank)
        with contextlib.nullcontext() if comm.clock is None else comm.clock.running():
            return work(comm)

    return baton.run([lambda rank=rank: live(rank) for rank in range(ranks)])  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class _Call:
    """What one rank asked for, as far as all ranks must agree on it; ``where`` is for the message alone."""

    kind: str
    detail: str
    where: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind}({self.detail}) at {self.where}"


class _Moment:
    """How far a stream has come. Ranks may issue from streams of their own, and one of them carries the work out."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event()

    def order(self) -> None:
        """Lets the current stream wait for that moment."""
        torch.cuda.current_stream().wait_event(self._event)


@dataclass(slots=True)
class _Arrival:
    call: _Call
    tensors: tuple[torch.Tensor, ...]
    splits: tuple[list[int], list[int]] | None = None
    ready: _Moment | None = None
    at_s: float = 0.0


class _Meeting:
    """One collective: who has arrived with what, and whether it is done."""

    def __init__(self) -> None:
        self.arrivals: dict[int, _Arrival] = {}
        self.is_done = False
        self.done: _Moment | None = None
        self.end_s = 0.0


@dataclass(slots=True)
class _Letter:
    """One side of a send and receive."""

    call: _Call
    tensor: torch.Tensor
    is_done: bool = False
    ready: _Moment | None = None
    done: _Moment | None = None
    at_s: float = 0.0
    end_s: float = 0.0


class _World:
    """Everything that virtual ranks share: the baton, their time if they have one, and groups by their members."""

    def __init__(self, baton: Baton, timing: VirtualTime | None) -> None:
        self.baton = baton
        self.timing = timing
        baton.explain = self._explain
        self._groups: dict[tuple[int, ...], list[_Group]] = {}
        self._asked: dict[tuple[tuple[int, ...], int], int] = {}

    def group(self, ranks: tuple[int, ...]) -> _Group:
        """Makes a group."""
        made = _Group(self, ranks)
        self._groups.setdefault(ranks, []).append(made)
        return made

    def join(self, ranks: tuple[int, ...], world_rank: int) -> _Group:
        """Gives a member its n-th group of these ranks: the same object to all of them."""
        count = self._asked.get((ranks, world_rank), 0)
        self._asked[ranks, world_rank] = count + 1
        made = [group for group in self._groups.get(ranks, []) if group.is_split]
        if count < len(made):
            return made[count]
        group = self.group(ranks)
        group.is_split = True
        return group

    def name(self, group: _Group) -> GroupName:
        """Names a group for a verdict."""
        return GroupName(group.ranks, self._groups[group.ranks].index(group))

    def _explain(self, waits: Mapping[int, Entry], finished: set[int]) -> str:
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
        """Returns a rank's clock, if the ranks have any."""
        return None if self.timing is None else self.timing.clocks[world_rank]

    def paused(self, world_rank: int) -> contextlib.AbstractContextManager[None]:
        """Stops a rank's clock."""
        clock = self.clock(world_rank)
        return contextlib.nullcontext() if clock is None else clock.paused()


class _Group:
    """A group's operations in flight, matched by the order in which each member issued them."""

    def __init__(self, world: _World, ranks: tuple[int, ...]) -> None:
        self.world = world
        self.ranks = ranks
        self.is_split = False
        self.issued = [0] * len(ranks)
        self._meetings: dict[int, _Meeting] = {}
        self._sends: dict[tuple[int, int, int], deque[_Letter]] = {}
        self._receives: dict[tuple[int, int, int], deque[_Letter]] = {}
        self._free_s = 0.0  # when the last collective ends, on the clocks
        self._pair_free_s: dict[tuple[int, int], float] = {}  # and the last message of a sender to a receiver

    def meet(self, rank: int, arrival: _Arrival, carry_out: Callable[[list[_Arrival]], None]) -> Work:
        """Adds a rank to its next collective; the last one to arrive carries it out."""
        with self.world.paused(self.ranks[rank]):
            return self._meet(rank, arrival, carry_out)

    def _meet(self, rank: int, arrival: _Arrival, carry_out: Callable[[list[_Arrival]], None]) -> Work:
        baton, clock = self.world.baton, self.world.clock(self.ranks[rank])
        if clock is not None:
            arrival.at_s = clock.now_s
        baton.sign_of_life()
        number = self.issued[rank]
        self.issued[rank] += 1
        meeting = self._meetings.setdefault(number, _Meeting())
        meeting.arrivals[rank] = arrival
        is_cuda = baton.device.type == "cuda"
        if is_cuda:
            arrival.ready = _Moment()
        first = next(iter(meeting.arrivals.values())).call
        if arrival.call != first:
            baton.fail(CollectiveMismatchError(self._describe_mismatch(number, meeting)))
        if len(meeting.arrivals) == len(self.ranks):
            del self._meetings[number]
            for each in meeting.arrivals.values():
                if each.ready is not None:
                    each.ready.order()
            with torch.no_grad():
                carry_out([meeting.arrivals[r] for r in range(len(self.ranks))])
            self._time_meeting(meeting)
            meeting.is_done = True
            meeting.done = _Moment() if is_cuda else None
            meeting.arrivals = {}  # lets go of the tensors
        wait = Wait(
            lambda: meeting.is_done,
            lambda: self._describe(number, meeting),
            lambda: self._entry(arrival.call, number),
        )
        kind = arrival.call.kind
        return _VirtualWork(self.world, self.ranks[rank], wait, lambda: (meeting.done, meeting.end_s, kind))

    def post(self, letter: _Letter, key: tuple[int, int, int], *, is_send: bool) -> Work:
        """Matches a send with the oldest receive of the same two ranks and tag, or the other way round."""
        with self.world.paused(self.ranks[key[0] if is_send else key[1]]):
            return self._post(letter, key, is_send=is_send)

    def _post(self, letter: _Letter, key: tuple[int, int, int], *, is_send: bool) -> Work:
        baton = self.world.baton
        baton.sign_of_life()
        if baton.device.type == "cuda":
            letter.ready = _Moment()
        rank = self.ranks[key[0] if is_send else key[1]]
        clock = self.world.clock(rank)
        if clock is not None:
            letter.at_s = clock.now_s
        own, other = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        waiting = other.get(key)
        if waiting:
            match = waiting.popleft()
            self._deliver(letter, match, is_send=is_send)
            self._time_letters(letter, match, key[:2])
        else:
            own.setdefault(key, deque()).append(letter)
        peer = self.ranks[key[1] if is_send else key[0]]
        wait = Wait(
            lambda: letter.is_done,
            lambda: f"rank {peer} to match {letter.call}",
            lambda: self._entry(letter.call, 0, peer=peer, tag=key[2]),
        )
        return _VirtualWork(self.world, rank, wait, lambda: (letter.done, letter.end_s, letter.call.kind))

    def _time_meeting(self, meeting: _Meeting) -> None:
        """Prices a collective: from the latest arrival on, or from the end of the one before it."""
        timing = self.world.timing
        if timing is None:
            return
        arrivals = meeting.arrivals.values()
        start_s = max(self._free_s, *(arrival.at_s for arrival in arrivals))
        # Of output and input the larger is the whole; ranks exchange different amounts in an all-to-all at most.
        num_bytes = max(max((_bytes(t) for t in arrival.tensors), default=0) for arrival in arrivals)
        kind = next(iter(arrivals)).call.kind
        meeting.end_s = self._free_s = timing.carry_out(kind, num_bytes, self.ranks, start_s)

    def _time_letters(self, letter: _Letter, match: _Letter, pair: tuple[int, int]) -> None:
        """Prices a message: from when both sides are there, and the one before it has arrived."""
        timing = self.world.timing
        if timing is None:
            return
        start_s = max(letter.at_s, match.at_s, self._pair_free_s.get(pair, 0.0))
        ranks = (self.ranks[pair[0]], self.ranks[pair[1]])
        end_s = timing.carry_out("send", _bytes(letter.tensor), ranks, start_s)
        letter.end_s = match.end_s = self._pair_free_s[pair] = end_s

    def _deliver(self, letter: _Letter, match: _Letter, *, is_send: bool) -> None:
        sent, received = (letter, match) if is_send else (match, letter)
        if sent.tensor.shape != received.tensor.shape or sent.tensor.dtype != received.tensor.dtype:
            self.world.baton.fail(
                CollectiveMismatchError(f"a send and its receive differ\n  {sent.call}\n  {received.call}")
            )
        for each in (sent, received):
            if each.ready is not None:
                each.ready.order()
        received.tensor.data.copy_(sent.tensor.data)
        sent.is_done = received.is_done = True
        if sent.ready is not None:
            sent.done = received.done = _Moment()

    def _entry(self, call: _Call, number: int, *, peer: int | None = None, tag: int = 0) -> Entry:
        asked = Call(kind=call.kind, op="" if peer is not None else call.detail, peer=peer, tag=tag)
        return Entry(number=1, group=self.world.name(self), sequence=number, call=asked, site=call.where)

    def _describe(self, number: int, meeting: _Meeting) -> str:
        call = next(iter(meeting.arrivals.values())).call
        missing = [self.ranks[r] for r in range(len(self.ranks)) if r not in meeting.arrivals]
        return f"{_ranks(missing)} in operation {number} of group {list(self.ranks)}: {call}"

    def _describe_mismatch(self, number: int, meeting: _Meeting) -> str:
        by_call: dict[_Call, list[int]] = {}
        for rank, arrival in sorted(meeting.arrivals.items()):
            by_call.setdefault(arrival.call, []).append(self.ranks[rank])
        lines = [f"  {_ranks(ranks)} called {call}" for call, ranks in by_call.items()]
        missing = [self.ranks[r] for r in range(len(self.ranks)) if r not in meeting.arrivals]
        if missing:
            lines.append(f"  {_ranks(missing)} had not arrived")
        head = f"ranks of group {list(self.ranks)} called different operations (operation {number} of the group)"
        rule = "  every rank of a group issues the same operations in the same order, with the same shapes and dtypes"
        return "\n".join([head, *lines, rule])


class _VirtualWork:
    """An operation of a virtual rank; waiting for it passes the baton on."""

    __slots__ = ("_outcome", "_rank", "_wait", "_world")

    def __init__(
        self, world: _World, rank: int, wait: Wait, outcome: Callable[[], tuple[_Moment | None, float, str]]
    ) -> None:
        """Takes what to wait for, and what tells how it ended: on the device, on the clocks, and what it was."""
        self._world = world
        self._rank = rank
        self._wait = wait
        self._outcome = outcome

    def wait(self) -> None:
        """Lets the other ranks run until the operation is done."""
        with self._world.paused(self._rank):
            self._world.baton.wait(self._rank, self._wait)
            moment, end_s, kind = self._outcome()
            if moment is not None:
                moment.order()
            clock = self._world.clock(self._rank)
            if clock is not None:
                clock.wait_until(end_s, kind)


class VirtualCommunicator:
    """One virtual rank's handle on a group."""

    takes_real_time = False  # a rank that waits for another waits for all that take their turns before it

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._rank = rank

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._group.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members by their rank in the world."""
        return self._group.ranks

    @property
    def device(self) -> torch.device:
        """The device that all virtual ranks share."""
        return self._group.world.baton.device

    @property
    def clock(self) -> VirtualClock | None:
        """This rank's clock, if the run has any."""
        return self._group.world.clock(self.ranks[self._rank])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Replaces ``tensor`` by the reduction over all ranks, taken in rank order."""

        def carry_out(arrivals: list[_Arrival]) -> None:
            result = _reduce([a.tensors[0] for a in arrivals], op)
            for arrival in arrivals:
                arrival.tensors[0].data.copy_(result)

        return self._meet("all_reduce", op, carry_out, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Puts this rank's slice of the reduction into ``output``."""
        check_pieces("reduce_scatter", whole=tensor, piece=output, size=self.size)

        def carry_out(arrivals: list[_Arrival]) -> None:
            result = _reduce([a.tensors[1] for a in arrivals], op).view(len(arrivals), -1)
            for piece, arrival in zip(result, arrivals, strict=True):
                arrival.tensors[0].data.view(-1).copy_(piece)

        return self._meet("reduce_scatter", op, carry_out, output, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Fills ``output`` with every rank's ``tensor`` in rank order."""
        check_pieces("all_gather", whole=output, piece=tensor, size=self.size)

        def carry_out(arrivals: list[_Arrival]) -> None:
            whole = torch.cat([a.tensors[1].reshape(-1) for a in arrivals])
            for arrival in arrivals:
                arrival.tensors[0].data.view(-1).copy_(whole)

        return self._meet("all_gather", "", carry_out, output, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Replaces ``tensor`` by that of rank ``source``."""
        check_peer("broadcast from", source, self.size)

        def carry_out(arrivals: list[_Arrival]) -> None:
            for rank, arrival in enumerate(arrivals):
                if rank != source:
                    arrival.tensors[0].data.copy_(arrivals[source].tensors[0])

        return self._meet("broadcast", f"source={source}", carry_out, tensor)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        """Sends the i-th piece of ``tensor`` to rank i; what each pair exchanges must agree on both sides."""
        splits = (
            all_to_all_splits(output, output_splits, self.size),
            all_to_all_splits(tensor, input_splits, self.size),
        )
        call = _Call("all_to_all", f"{_dtype(tensor)} rows of {list(tensor.shape[1:])}", _caller())

        def carry_out(arrivals: list[_Arrival]) -> None:
            self._exchange(arrivals)

        return self._group.meet(self._rank, _Arrival(call, (output, tensor), splits), carry_out)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Sends ``tensor``; done when the receive is there, so that an unmatched send is found."""
        check_peer("send to", to, self.size)
        call = _Call(
            "send", f"rank {self.ranks[self._rank]} to {self.ranks[to]}, {_shape(tensor)}, tag={tag}", _caller()
        )
        return self._group.post(_Letter(call, tensor), (self._rank, to, tag), is_send=True)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Receives into ``tensor``."""
        check_peer("recv from", source, self.size)
        names = f"rank {self.ranks[self._rank]} from {self.ranks[source]}"
        call = _Call("recv", f"{names}, {_shape(tensor)}, tag={tag}", _caller())
        return self._group.post(_Letter(call, tensor), (source, self._rank, tag), is_send=False)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._meet("barrier", "", lambda _: None).wait()

    def split(self, ranks: Sequence[int]) -> VirtualCommunicator:
        """Makes the subgroup of ``ranks``, of which this rank is a member."""
        check_split(ranks, self._rank, self.size)
        members = tuple(self.ranks[r] for r in ranks)
        group = self._group.world.join(members, self.ranks[self._rank])
        return VirtualCommunicator(group, list(ranks).index(self._rank))

    def _meet(
        self, kind: str, detail: str, carry_out: Callable[[list[_Arrival]], None], *tensors: torch.Tensor
    ) -> Work:
        parts = [detail, *(_shape(t) for t in tensors)]
        call = _Call(kind, ", ".join(part for part in parts if part), _caller())
        return self._group.meet(self._rank, _Arrival(call, tensors), carry_out)

    def _exchange(self, arrivals: list[_Arrival]) -> None:
        pieces = [torch.split(a.tensors[1].clone(), a.splits[1]) for a in arrivals if a.splits is not None]
        for me, arrival in enumerate(arrivals):
            assert arrival.splits is not None
            for peer, target in enumerate(torch.split(arrival.tensors[0].data, arrival.splits[0])):
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
    narrow = tensors[0].dtype in (torch.float16, torch.bfloat16)
    total = tensors[0].detach().to(torch.float32 if narrow else tensors[0].dtype, copy=True)
    for tensor in tensors[1:]:
        if op in ("sum", "avg"):
            total += tensor
        else:
            torch.minimum(total, tensor, out=total) if op == "min" else torch.maximum(total, tensor, out=total)
    if op == "avg":
        total /= len(tensors)
    return total


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _caller() -> str:
    return call_site(sys._getframe(1))
