"""What virtual ranks share: groups, the collectives that members meet in, and the messages between two of them.

Operations of a group are matched by the order in which each member issued them, messages by their two ranks and tag.
The last to arrive carries a collective out, so that every tensor is there; on CUDA each side's stream is ordered after
the others' by events. Ranks with clocks pay for an operation from the latest arrival on, or from when the group is
free. A rank that asks for something else than the others ends the run with what each of them called.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from paceline.comm.base import Work
from paceline.comm.virtual.baton import Baton, BatonWait
from paceline.comm.virtual.clock import VirtualClock, VirtualTime
from paceline.errors import CollectiveMismatchError
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.verdict import find_hang


@dataclass(frozen=True, slots=True)
class VirtualCall:
    """What one rank asked for, as far as all ranks must agree on it; ``where`` is for the message alone."""

    kind: str
    detail: str
    where: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind}({self.detail}) at {self.where}"


class StreamPoint:
    """A point in a CUDA stream. Ranks may issue from streams of their own, and one of them carries the work out."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event()

    def order(self) -> None:
        """Lets the current stream wait for that point."""
        torch.cuda.current_stream().wait_event(self._event)


@dataclass(slots=True)
class Contribution:
    """What one rank brings to a collective: its tensors, and when they are ready."""

    call: VirtualCall
    tensors: tuple[torch.Tensor, ...]
    splits: tuple[list[int], list[int]] | None = None
    ready: StreamPoint | None = None
    at_s: float = 0.0


class _Collective:
    """One collective: what each rank that has arrived contributes, and whether it is done."""

    def __init__(self) -> None:
        self.contributions: dict[int, Contribution] = {}
        self.is_done = False
        self.done: StreamPoint | None = None
        self.end_s = 0.0


@dataclass(slots=True)
class PostedMessage:
    """One side of a send and receive."""

    call: VirtualCall
    tensor: torch.Tensor
    is_done: bool = False
    ready: StreamPoint | None = None
    done: StreamPoint | None = None
    at_s: float = 0.0
    end_s: float = 0.0


class VirtualWorld:
    """Everything that virtual ranks share: the baton, their time if they have one, and groups by their members."""

    def __init__(self, baton: Baton, timing: VirtualTime | None) -> None:
        self.baton = baton
        self.timing = timing
        baton.explain = self._explain
        self._groups: dict[tuple[int, ...], list[VirtualGroup]] = {}
        self._asked: dict[tuple[tuple[int, ...], int], int] = {}

    def group(self, ranks: tuple[int, ...]) -> VirtualGroup:
        made = VirtualGroup(self, ranks)
        self._groups.setdefault(ranks, []).append(made)
        return made

    def join(self, ranks: tuple[int, ...], world_rank: int) -> VirtualGroup:
        """Gives a member its n-th group of these ranks: the same object to all of them."""
        count = self._asked.get((ranks, world_rank), 0)
        self._asked[ranks, world_rank] = count + 1
        made = [group for group in self._groups.get(ranks, []) if group.is_split]
        if count < len(made):
            return made[count]
        group = self.group(ranks)
        group.is_split = True
        return group

    def name(self, group: VirtualGroup) -> GroupName:
        """Names a group for a verdict."""
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
        """Returns a rank's clock, if the ranks have any."""
        return None if self.timing is None else self.timing.clocks[world_rank]

    def paused(self, world_rank: int) -> contextlib.AbstractContextManager[None]:
        """Stops a rank's clock."""
        clock = self.clock(world_rank)
        return contextlib.nullcontext() if clock is None else clock.paused()


class VirtualGroup:
    """A group's operations in flight, matched by the order in which each member issued them."""

    def __init__(self, world: VirtualWorld, ranks: tuple[int, ...]) -> None:
        self.world = world
        self.ranks = ranks
        self.is_split = False
        self.issued = [0] * len(ranks)
        self._collectives: dict[int, _Collective] = {}
        self._sends: dict[tuple[int, int, int], deque[PostedMessage]] = {}
        self._receives: dict[tuple[int, int, int], deque[PostedMessage]] = {}
        self._free_s = 0.0  # when the last collective ends, on the clocks
        self._pair_free_s: dict[tuple[int, int], float] = {}  # and the last message of a sender to a receiver

    def meet(self, rank: int, contribution: Contribution, carry_out: Callable[[list[Contribution]], None]) -> Work:
        """Adds a rank to its next collective; the last one to arrive carries it out."""
        with self.world.paused(self.ranks[rank]):
            baton, clock = self.world.baton, self.world.clock(self.ranks[rank])
            if clock is not None:
                contribution.at_s = clock.now_s
            baton.sign_of_life()
            number = self.issued[rank]
            self.issued[rank] += 1
            collective = self._collectives.setdefault(number, _Collective())
            collective.contributions[rank] = contribution
            is_cuda = baton.device.type == "cuda"
            if is_cuda:
                contribution.ready = StreamPoint()
            first = next(iter(collective.contributions.values())).call
            if contribution.call != first:
                baton.fail(CollectiveMismatchError(self._describe_mismatch(number, collective)))
            if len(collective.contributions) == len(self.ranks):
                del self._collectives[number]
                for each in collective.contributions.values():
                    if each.ready is not None:
                        each.ready.order()
                with torch.no_grad():
                    carry_out([collective.contributions[r] for r in range(len(self.ranks))])
                self._time_collective(collective)
                collective.is_done = True
                collective.done = StreamPoint() if is_cuda else None
                collective.contributions = {}  # lets go of the tensors
            wait = BatonWait(
                lambda: collective.is_done,
                lambda: self._describe(number, collective),
                lambda: self._entry(contribution.call, number),
            )
            kind = contribution.call.kind
            return _VirtualWork(self.world, self.ranks[rank], wait, lambda: (collective.done, collective.end_s, kind))

    def post(self, message: PostedMessage, key: tuple[int, int, int], *, is_send: bool) -> Work:
        """Matches a send with the oldest receive of the same two ranks and tag, or the other way round."""
        rank = self.ranks[key[0] if is_send else key[1]]
        with self.world.paused(rank):
            baton = self.world.baton
            baton.sign_of_life()
            if baton.device.type == "cuda":
                message.ready = StreamPoint()
            clock = self.world.clock(rank)
            if clock is not None:
                message.at_s = clock.now_s
            own, other = (self._sends, self._receives) if is_send else (self._receives, self._sends)
            waiting = other.get(key)
            if waiting:
                match = waiting.popleft()
                self._deliver(message, match, is_send=is_send)
                self._time_messages(message, match, key[:2])
            else:
                own.setdefault(key, deque()).append(message)
            peer = self.ranks[key[1] if is_send else key[0]]
            wait = BatonWait(
                lambda: message.is_done,
                lambda: f"rank {peer} to match {message.call}",
                lambda: self._entry(message.call, 0, peer=peer, tag=key[2]),
            )
            return _VirtualWork(self.world, rank, wait, lambda: (message.done, message.end_s, message.call.kind))

    def _time_collective(self, collective: _Collective) -> None:
        """Prices a collective: from the latest arrival on, or from the end of the one before it."""
        timing = self.world.timing
        if timing is None:
            return
        contributions = collective.contributions.values()
        start_s = max(self._free_s, *(contribution.at_s for contribution in contributions))
        # Of output and input the larger is the whole; ranks exchange different amounts in an all-to-all at most.
        num_bytes = max(max((t.nbytes for t in contribution.tensors), default=0) for contribution in contributions)
        kind = next(iter(contributions)).call.kind
        collective.end_s = self._free_s = timing.carry_out(kind, num_bytes, self.ranks, start_s)

    def _time_messages(self, message: PostedMessage, match: PostedMessage, pair: tuple[int, int]) -> None:
        """Prices a message: from when both sides are there, and the one before it has arrived."""
        timing = self.world.timing
        if timing is None:
            return
        start_s = max(message.at_s, match.at_s, self._pair_free_s.get(pair, 0.0))
        ranks = (self.ranks[pair[0]], self.ranks[pair[1]])
        end_s = timing.carry_out("send", message.tensor.nbytes, ranks, start_s)
        message.end_s = match.end_s = self._pair_free_s[pair] = end_s

    def _deliver(self, message: PostedMessage, match: PostedMessage, *, is_send: bool) -> None:
        sent, received = (message, match) if is_send else (match, message)
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
            sent.done = received.done = StreamPoint()

    def _entry(self, call: VirtualCall, number: int, *, peer: int | None = None, tag: int = 0) -> LedgerEntry:
        asked = LedgerCall(kind=call.kind, op="" if peer is not None else call.detail, peer=peer, tag=tag)
        return LedgerEntry(number=1, group=self.world.name(self), sequence=number, call=asked, site=call.where)

    def _describe(self, number: int, collective: _Collective) -> str:
        call = next(iter(collective.contributions.values())).call
        missing = [self.ranks[r] for r in range(len(self.ranks)) if r not in collective.contributions]
        return f"{_ranks(missing)} in operation {number} of group {list(self.ranks)}: {call}"

    def _describe_mismatch(self, number: int, collective: _Collective) -> str:
        by_call: dict[VirtualCall, list[int]] = {}
        for rank, contribution in sorted(collective.contributions.items()):
            by_call.setdefault(contribution.call, []).append(self.ranks[rank])
        lines = [f"  {_ranks(ranks)} called {call}" for call, ranks in by_call.items()]
        missing = [self.ranks[r] for r in range(len(self.ranks)) if r not in collective.contributions]
        if missing:
            lines.append(f"  {_ranks(missing)} had not arrived")
        head = f"ranks of group {list(self.ranks)} called different operations (operation {number} of the group)"
        rule = "  every rank of a group issues the same operations in the same order, with the same shapes and dtypes"
        return "\n".join([head, *lines, rule])


class _VirtualWork:
    """An operation of a virtual rank; waiting for it passes the baton on."""

    __slots__ = ("_outcome", "_rank", "_wait", "_world")

    def __init__(
        self,
        world: VirtualWorld,
        rank: int,
        wait: BatonWait,
        outcome: Callable[[], tuple[StreamPoint | None, float, str]],
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


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
