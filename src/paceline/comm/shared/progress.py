"""Operations that go on whenever their process enters the communicator, without a thread of their own.

Moving bytes takes a core's time whichever thread does it, and a thread costs two switches for each small operation.

An operation is a generator: it does what can be done, and yields the ranks that it waits for. Operations of a queue
take their turns in the order of issue. Issuing one moves all of them on without waiting; waiting for one moves all of
them on until it is done, those of other groups too: two ranks that wait for two groups in opposite order still meet.

[Note: fences] Counters in shared memory tell another process that data is there. A processor may let a later write be
seen before an earlier one. Giving a lock back and taking it again keeps them apart: the first orders what came before
it, the second what comes after, and the two stay in order.

Messages: every ordered pair of ranks has a ring of a few cells. The sender fills them, the receiver empties them, and
each counts what it has done. Messages of a pair arrive in the order they were sent; the receiver keeps one that nobody
has asked for yet. A send is done when the last cell is filled.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from paceline.errors import CollectiveMismatchError, CommunicationError

Steps = Iterator[tuple[int, ...]]  # yields the ranks that the operation waits for

_SPINS = 40  # some 50 us of looking, where each rank has a core
_PATIENCE_NS = 20_000  # of one look of the compiled code
_YIELDS = 300
_CROWDED_S = 50e-6
_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 500e-6
_WATCH_S = 0.1


class Fence:
    """Keeps memory accesses before and after it apart: see [Note: fences]. ``crossings`` counts its uses."""

    __slots__ = ("_give", "_take", "crossings")

    def __init__(self) -> None:
        self.crossings = 0
        lock = threading.Lock()
        lock.acquire()
        self._give = lock.release
        self._take = lock.acquire

    def __call__(self) -> None:
        self.crossings += 1
        self._give()
        self._take(False)


@dataclass(slots=True, eq=False)
class PendingOperation:
    kind: str
    finish: Callable[[], object] | None = None
    is_done: bool = False
    error: CommunicationError | None = None
    missing: tuple[int, ...] = ()

    def end(self, error: CommunicationError | None = None) -> None:
        if not self.is_done:
            if error is None and self.finish is not None:
                self.finish()
            self.error = error
            self.is_done = True


class OperationQueue:
    """Operations one after the other. It and ``Inbox`` are lanes: what takes operations, and moves them on."""

    def __init__(self, on_error: Callable[[str, BaseException], None]) -> None:
        self._operations: deque[tuple[PendingOperation, Steps]] = deque()
        self._on_error = on_error

    def add(self, operation: PendingOperation, steps: Steps) -> None:
        self._operations.append((operation, steps))

    def pump(self) -> bool:
        """Goes on with the first, and with the next when it is done; True when nothing is left."""
        while self._operations:
            operation, steps = self._operations[0]
            try:
                operation.missing = next(steps)
            except StopIteration:
                operation.end()
                self._operations.popleft()
            except BaseException as error:  # an interrupt too: the generator is over, and its data half there
                self._on_error(operation.kind, error)  # ends all of the group's operations, these too
                if not isinstance(error, Exception):
                    raise
                return True
            else:
                return False
        return True

    def missing(self) -> tuple[int, ...]:
        return self._operations[0][0].missing if self._operations else ()

    def fail(self, error: CommunicationError) -> None:
        while self._operations:
            self._operations.popleft()[0].end(error)


class ProgressLoop:
    """What a process has in flight, over all groups that were made from one another."""

    def __init__(self, *, may_spin: bool) -> None:
        self.fence = Fence()
        self.patience_ns = 0  # how long an operation that can look for others by itself may do so now
        self.may_spin = may_spin
        self._spins = _SPINS if may_spin else 0
        self._lanes: list[OperationLane] = []
        self._lock = threading.Lock()

    def issue(self, lane: OperationLane, operation: PendingOperation, *what: Any) -> None:
        with self._lock:
            lane.add(operation, *what)
            if lane not in self._lanes:
                self._lanes.append(lane)
            self._pump()

    def wait(self, operation: PendingOperation, watch: Callable[[float], None]) -> None:
        """Returns when ``operation`` is over; ``watch(seconds without progress)`` ends it where it cannot be done."""
        turn, crossings = 0, -1
        start_s = next_watch_s = 0.0
        while not operation.is_done:
            with self._lock:
                # Not where other lanes wait for their turn, nor when it has been in vain for long.
                may_look = turn < self._spins // 8 and len(self._lanes) == 1
                self.patience_ns = _PATIENCE_NS if may_look else 0
                self._pump()
                self.patience_ns = 0
            if crossings != self.fence.crossings:
                turn, start_s, crossings = 0, 0.0, self.fence.crossings
            turn += 1
            if turn <= self._spins:
                continue
            now = time.monotonic()
            if turn <= self._spins + _YIELDS:
                os.sched_yield()
                if time.monotonic() - now > _CROWDED_S:
                    # Others want this core. A sleeper is let in soon after it wakes, one that yields after all others.
                    turn = self._spins + _YIELDS
                continue
            start_s = start_s or now
            if now >= next_watch_s:
                next_watch_s = now + _WATCH_S
                with self._lock:
                    watch(now - start_s)
            time.sleep(min(_SHORTEST_NAP_S * (turn - self._spins - _YIELDS), _LONGEST_NAP_S))

    def _pump(self) -> None:
        for lane in tuple(self._lanes):
            if lane.pump():
                self._lanes.remove(lane)


CELLS = 4
HEADER_WORDS = 8  # before each cell: tag, bytes of the message; one cache line
COUNTER_WORDS = 16  # of a ring: the sender's line and the receiver's
_SENT, _TAKEN = 0, 8


@dataclass(slots=True, eq=False)
class Ring:
    """The cells of one sender and one receiver, and the words before each."""

    counters: memoryview
    headers: list[memoryview]
    cells: list[torch.Tensor]
    fence: Fence

    @property
    def cell_bytes(self) -> int:
        return self.cells[0].numel()

    def free(self) -> int | None:
        sent = self.counters[_SENT]
        if sent - self.counters[_TAKEN] >= CELLS:
            return None
        self.fence()
        return sent % CELLS

    def full(self) -> int | None:
        taken = self.counters[_TAKEN]
        if self.counters[_SENT] <= taken:
            return None
        self.fence()
        return taken % CELLS

    def pop(self) -> None:
        self.fence()
        self.counters[_TAKEN] += 1

    def put(self, message: torch.Tensor, to: int, tag: int) -> Steps:
        for number, piece in enumerate(torch.split(message, self.cell_bytes)):  # one empty piece of an empty message
            while (place := self.free()) is None:
                yield (to,)
            if not number:
                header = self.headers[place]
                header[0], header[1] = tag, message.numel()
            self.cells[place][: piece.numel()].copy_(piece)
            self.fence()
            self.counters[_SENT] += 1


@dataclass(slots=True, eq=False)
class _ArrivingMessage:
    tag: int
    operation: PendingOperation | None  # None: of a receive to come
    content: torch.Tensor
    num_taken: int = 0


class Inbox:
    def __init__(self, ring: Ring, source: int, on_error: Callable[[str, BaseException], None]) -> None:
        self._ring, self._source, self._on_error = ring, source, on_error
        self._posted: deque[tuple[PendingOperation, torch.Tensor, int]] = deque()
        self._kept: deque[_ArrivingMessage] = deque()
        self._arriving: _ArrivingMessage | None = None

    def add(self, operation: PendingOperation, target: torch.Tensor, tag: int) -> None:
        self._posted.append((operation, target, tag))

    def pump(self) -> bool:
        try:
            self._hand_out()
            while self._posted or (self._arriving is not None and self._arriving.operation is not None):
                place = self._ring.full()
                if place is None:
                    return False
                self._empty(place)
        except BaseException as error:
            self._on_error("recv", error)  # ends all of the group's operations, these too
            if not isinstance(error, Exception):
                raise
        return True

    def missing(self) -> tuple[int, ...]:
        return (self._source,)

    def fail(self, error: CommunicationError) -> None:
        if self._arriving is not None and self._arriving.operation is not None:
            self._arriving.operation.end(error)
        while self._posted:
            self._posted.popleft()[0].end(error)

    def _empty(self, place: int) -> None:
        letter = self._arriving
        if letter is None:
            tag, num_bytes = self._ring.headers[place][:2]
            posted = self._take_posted(tag, num_bytes) or (None, torch.empty(num_bytes, dtype=torch.uint8))
            letter = self._arriving = _ArrivingMessage(tag, *posted)
        piece = letter.content[letter.num_taken : letter.num_taken + self._ring.cell_bytes]
        piece.copy_(self._ring.cells[place][: piece.numel()])
        letter.num_taken += piece.numel()
        self._ring.pop()
        if letter.num_taken == letter.content.numel():
            self._arriving = None
            if letter.operation is not None:
                letter.operation.end()
            else:
                self._kept.append(letter)
                self._hand_out()

    def _hand_out(self) -> None:
        for letter in tuple(self._kept):
            posted = self._take_posted(letter.tag, letter.content.numel())
            if posted is not None:
                posted[1].copy_(letter.content)
                self._kept.remove(letter)
                posted[0].end()

    def _take_posted(self, tag: int, num_bytes: int) -> tuple[PendingOperation, torch.Tensor] | None:
        """Takes the oldest receive of a tag, and where it puts what comes."""
        for entry in self._posted:
            operation, target, wanted = entry
            if wanted != tag:
                continue
            if num_bytes != target.numel():
                raise CollectiveMismatchError(
                    f"rank {self._source} of the group sends {num_bytes} bytes (tag {tag}), "
                    f"this rank receives {target.numel()}\n  a send and its receive have the same shape and dtype"
                )
            self._posted.remove(entry)
            return operation, target
        return None


OperationLane: TypeAlias = OperationQueue | Inbox
