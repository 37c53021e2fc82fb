"""Rounds of messages carried out on a communicator's ``send`` and ``recv``.

An operation is cut into lanes: parts of the tensor that go through their rounds side by side, so that one is added up
while the next is on its way. Issuing an operation posts its first round; ``wait`` carries out the rest, after whatever
this rank issued before. That order is why operations in flight never wait in a circle: as all ranks issue in the same
order, the oldest that is not done is the one that all of them work on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from paceline.comm.base import Communicator, ReduceOp, Work
from paceline.comm.rounds import Message, Round


class Lane:
    """A part of a tensor on its way through its rounds.

    Sends are awaited at the end: where one is overwritten before, it is by a sum that its receiver had a part in, so
    that it has left. Memory for what is added is taken once.
    """

    def __init__(self, comm: Communicator, flat: torch.Tensor, rounds: Sequence[Round], op: ReduceOp, tag: int) -> None:
        self.num_rounds = len(rounds)
        self._comm = comm
        self._flat = flat
        self._rounds = rounds
        self._op = op
        self._tag = tag
        longest = max((sum(m.stop - m.start for m in each.sums) for each in rounds), default=0)
        self._scratch = torch.empty(longest, dtype=flat.dtype, device=flat.device)
        self._arriving: list[torch.Tensor] = []
        self._receives: list[Work] = []
        self._sends: list[Work] = []

    def post(self, number: int) -> None:
        """Posts the messages of a round."""
        if number >= self.num_rounds:
            return
        this, me = self._rounds[number], self._comm.rank
        # Of two ranks that send to each other the lower one posts its sends first, the other one its receives: NCCL
        # carries out what a pair posts one after another.
        self._post_sends([message for message in this.sends if message.peer > me])
        self._post_receives(this)
        self._post_sends([message for message in this.sends if message.peer < me])

    def finish(self, number: int) -> None:
        """Waits for what a round receives, and adds it up."""
        if number >= self.num_rounds:
            return
        for work in self._receives:
            work.wait()
        self._receives.clear()
        sums = self._rounds[number].sums
        if self._arriving:
            divisor = self._comm.size if self._op == "avg" and self._rounds[number].is_total else 1
            combine(self._flat[sums[0].start : sums[0].stop], self._arriving, self._op, divisor)
            self._arriving = []

    def close(self) -> None:
        """Waits until everything has left, and lets go of the memory."""
        for work in self._sends:
            work.wait()
        self._sends.clear()
        self._scratch = self._flat = torch.empty(0)

    def _post_sends(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.stop > message.start:
                piece = self._flat[message.start : message.stop]
                self._sends.append(self._comm.send(piece, message.peer, self._tag))

    def _post_receives(self, this: Round) -> None:
        for message in this.copies:
            if message.stop > message.start:
                piece = self._flat[message.start : message.stop]
                self._receives.append(self._comm.recv(piece, message.peer, self._tag))
        used = 0
        for message in this.sums:
            length = message.stop - message.start
            if length:
                piece = self._scratch[used : used + length]
                used += length
                self._arriving.append(piece)
                self._receives.append(self._comm.recv(piece, message.peer, self._tag))


class InFlight:
    """The operations that a rank has issued and not finished, in the order of issue: for a group and its subgroups."""

    def __init__(self) -> None:
        self._operations: deque[Operation] = deque()

    def __len__(self) -> int:
        return len(self._operations)

    def issue(self, lanes: Sequence[Lane], deliver: Callable[[], None]) -> Operation:
        """Posts the first round of an operation; ``deliver`` puts the result where it belongs."""
        operation = Operation(self, lanes, deliver)
        self._operations.append(operation)
        return operation

    def newest(self) -> Operation | None:
        """Returns the operation that was issued last, if it is not finished."""
        return self._operations[-1] if self._operations else None

    def finish_through(self, operation: Operation | None) -> None:
        """Finishes the operations up to this one, oldest first; None: nothing."""
        while operation is not None and not operation.is_finished:
            self._operations.popleft().finish()


class Operation:
    """A collective in flight."""

    def __init__(self, in_flight: InFlight, lanes: Sequence[Lane], deliver: Callable[[], None]) -> None:
        self.is_finished = False
        self._in_flight = in_flight
        self._lanes = list(lanes)
        self._deliver: Callable[[], None] | None = deliver
        self._error: Exception | None = None
        for lane in self._lanes:
            lane.post(0)

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
                for lane in self._lanes:
                    lane.finish(number)
                    lane.post(number + 1)
            for lane in self._lanes:
                lane.close()
            if self._deliver is not None:
                self._deliver()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._lanes, self._deliver = [], None


class Behind:
    """A work of the inner communicator that was issued behind operations in flight.

    Another rank may wait for those first: they are finished here too before this rank waits for anything else.
    """

    __slots__ = ("_before", "_in_flight", "_work")

    def __init__(self, work: Work, in_flight: InFlight, before: Operation) -> None:
        self._work = work
        self._in_flight = in_flight
        self._before = before

    def wait(self) -> None:
        """Finishes what was issued before, and waits."""
        self._in_flight.finish_through(self._before)
        self._work.wait()


def combine(target: torch.Tensor, pieces: Sequence[torch.Tensor], op: ReduceOp, divisor: int = 1) -> None:
    """Reduces ``pieces`` into ``target``, in order, and divides.

    Floats of 8 and 16 bits are added in float32 and rounded once, that is, once in every round that they go through.
    """
    is_one_addition = target.element_size() == 2 and len(pieces) == 1 and divisor == 1  # torch adds these in float32
    if target.is_floating_point() and target.element_size() < 4 and not is_one_addition:
        wide = target.float()
        combine(wide, pieces, op, divisor)
        target.copy_(wide)
        return
    for piece in pieces:
        other = piece.to(target.dtype)
        if op in ("sum", "avg"):
            target.add_(other)
        else:
            (torch.minimum if op == "min" else torch.maximum)(target, other, out=target)
    if divisor != 1:
        target.div_(divisor)
