"""Rounds of messages carried out on a communicator's ``send`` and ``recv``.

An operation is cut into lanes: parts of the tensor that go through their rounds side by side, so that one is added up
while the next is on its way. Issuing an operation posts its first round; ``wait`` carries out the rest, after whatever
this rank issued before: as all ranks issue in the same order, operations in flight never wait in a circle.

[Note: ahead] A message leaves when its receiver has said that it is ready, and on a busy link that word stands in line
behind data. So what a lane receives is posted one round before it is needed. Not so on NCCL, which works in order.

[Note: window] What is received may be held back to a few lanes after the one that is being added up, so that of two
ranks that send to the same one none runs ahead of the other, and takes the share of a link that the sum waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.comm.algorithms.rounds import Round
from paceline.comm.base import Communicator, ReduceOp, Work, reduce_pair


class MessageLane:
    """A part of a tensor on its way through its rounds.

    Sends are awaited at the end: one that is overwritten before has left, as its receiver had a part in the sum.
    """

    def __init__(self, comm: Communicator, flat: torch.Tensor, rounds: Sequence[Round], op: ReduceOp, tag: int) -> None:
        self.num_rounds = len(rounds)
        self._comm, self._tag = comm, tag
        self._flat, self._rounds, self._op = flat, rounds, op
        self._ahead = 1 if comm.device.type == "cpu" else 0  # see [Note: ahead]
        longest = max((sum(one.stop - one.start for one in each.sums) for each in rounds), default=0)
        self._scratch = [torch.empty(longest, dtype=flat.dtype, device=flat.device) for _ in range(self._ahead + 1)]
        # Of the rounds from the one that is finished next: all that is received, and the pieces to be added.
        self._arriving: deque[tuple[list[Work], list[torch.Tensor]]] = deque()
        self._num_received = 0  # rounds whose receives are posted
        self._sends: list[Work] = []

    def post(self, number: int, *, receives: bool = True) -> None:
        """Posts what a round sends, and with ``receives`` what it receives."""
        if number >= self.num_rounds:
            return
        # Of two ranks that send to each other the lower one posts its sends first, the other one its receives: NCCL
        # carries out what a pair posts one after another.
        for is_above in (True, False):
            for each in self._rounds[number].sends:
                if (each.peer > self._comm.rank) == is_above and each.stop > each.start:
                    work = self._comm.send(self._flat[each.start : each.stop], each.peer, self._tag)
                    self._sends.append(work)
            if is_above and receives:
                self.receive(number)

    def receive(self, number: int) -> None:
        """Posts what the rounds up to this one receive, and what may be posted ahead of it."""
        while self._num_received < min(number + self._ahead + 1, self.num_rounds):
            this = self._rounds[self._num_received]
            free = self._scratch[self._num_received % len(self._scratch)]
            copied = [self._flat[message.start : message.stop] for message in this.copies]
            lengths = [message.stop - message.start for message in this.sums]
            added = list(torch.split(free[: sum(lengths)], lengths)) if lengths else []
            pairs = zip((*this.copies, *this.sums), (*copied, *added), strict=True)
            works = [self._comm.recv(piece, message.peer, self._tag) for message, piece in pairs if piece.numel()]
            self._arriving.append((works, [piece for piece in added if piece.numel()]))
            self._num_received += 1

    def finish(self, number: int) -> None:
        if number >= self.num_rounds:
            return
        works, pieces = self._arriving.popleft()
        for work in works:
            work.wait()
        if pieces:
            this = self._rounds[number]
            divisor = self._comm.size if self._op == "avg" and this.is_total else 1
            combine(self._flat[this.sums[0].start : this.sums[0].stop], pieces, self._op, divisor)

    def close(self) -> None:
        for work in self._sends:
            work.wait()
        self._sends.clear()
        self._scratch, self._flat = [], torch.empty(0)


class InFlight:
    """The operations that a rank has issued and not finished, in the order of issue: for a group and its subgroups."""

    def __init__(self) -> None:
        self._operations: deque[RoundsWork] = deque()

    def issue(self, lanes: list[MessageLane], deliver: Callable[[], None], window: int | None = None) -> RoundsWork:
        """Posts the first round; ``deliver`` puts the result in place. ``window``: of lanes that receive; None: all."""
        operation = RoundsWork(self, lanes, deliver, window or len(lanes))
        self._operations.append(operation)
        return operation

    def newest(self) -> RoundsWork | None:
        return self._operations[-1] if self._operations else None

    def finish_through(self, operation: RoundsWork | None) -> None:
        """Finishes the operations up to this one, oldest first; None: nothing."""
        while operation is not None and not operation.is_finished:
            self._operations.popleft().finish()


class RoundsWork:
    def __init__(self, in_flight: InFlight, lanes: list[MessageLane], deliver: Callable[[], None], window: int) -> None:
        self.is_finished = False
        self._in_flight, self._lanes, self._window = in_flight, lanes, window
        self._deliver: Callable[[], None] | None = deliver
        self._error: Exception | None = None
        for place, lane in enumerate(self._lanes):
            lane.post(0, receives=place < self._window)

    def wait(self) -> None:
        """Carries out what is left of this operation and of those before it. Safe to call twice."""
        self._in_flight.finish_through(self)
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Carries out all rounds. What fails here is raised to whoever drives, and to whoever waits for this one."""
        self.is_finished = True
        try:
            for number in range(max((lane.num_rounds for lane in self._lanes), default=0)):
                for place, lane in enumerate(self._lanes):  # the next round is posted as soon as a lane has finished
                    lane.finish(number)
                    if place + self._window < len(self._lanes):
                        self._lanes[place + self._window].receive(number)
                    lane.post(number + 1, receives=place < self._window)
            for lane in self._lanes:
                lane.close()
            if self._deliver is not None:
                self._deliver()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._lanes, self._deliver = [], None


@dataclass(slots=True, eq=False)
class WorkBehind:
    """A work of the inner communicator behind operations in flight, which other ranks may wait for: they go first."""

    work: Work
    in_flight: InFlight
    before: RoundsWork

    def wait(self) -> None:
        self.in_flight.finish_through(self.before)
        self.work.wait()


def combine(target: torch.Tensor, pieces: Sequence[torch.Tensor], op: ReduceOp, divisor: int = 1) -> None:
    """Reduces ``pieces`` into ``target``, in order, and divides; narrow floats in float32, rounded once a round."""
    is_one_addition = target.element_size() == 2 and len(pieces) == 1 and divisor == 1  # torch adds these in float32
    if target.is_floating_point() and target.element_size() < 4 and not is_one_addition:
        wide = target.float()
        combine(wide, pieces, op, divisor)
        target.copy_(wide)
        return
    for piece in pieces:
        reduce_pair(target, piece.to(target.dtype), op, out=target)
    if divisor != 1:
        target.div_(divisor)
