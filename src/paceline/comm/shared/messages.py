"""Messages between two ranks through shared memory.

Every ordered pair of ranks has a ring of a few cells: the sender fills them, the receiver empties them, and each counts
what it has done. A message of B bytes is copied once in and once out, a cell at a time. Messages of a pair arrive in
the order they were sent; one that nobody asked for yet, because receives were posted in another order of tags, is kept
by the receiver until somebody does. A send is done when the last cell is filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.comm.shared.progress import Fence, PendingOperation, Steps
from paceline.errors import CollectiveMismatchError, CommunicationError

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

    def push(self) -> None:
        self.fence()
        self.counters[_SENT] += 1

    def pop(self) -> None:
        self.fence()
        self.counters[_TAKEN] += 1


def send(ring: Ring, message: torch.Tensor, to: int, tag: int) -> Steps:
    for number, piece in enumerate(torch.split(message, ring.cell_bytes)):  # one empty piece of an empty message
        while (place := ring.free()) is None:
            yield (to,)
        if not number:
            header = ring.headers[place]
            header[0], header[1] = tag, message.numel()
        ring.cells[place][: piece.numel()].copy_(piece)
        ring.push()


@dataclass(slots=True, eq=False)
class _ArrivingMessage:
    """A message that arrives: for a receive that was posted, or for one to come."""

    tag: int
    content: torch.Tensor
    operation: PendingOperation | None
    num_taken: int = 0


class Inbox:
    """What one rank receives from one other."""

    def __init__(self, ring: Ring, source: int, on_error: Callable[[str, BaseException], None]) -> None:
        self._ring = ring
        self._source = source
        self._on_error = on_error
        self._posted: deque[tuple[PendingOperation, torch.Tensor, int]] = deque()
        self._kept: deque[_ArrivingMessage] = deque()
        self._arriving: _ArrivingMessage | None = None

    def add(self, operation: PendingOperation, target: torch.Tensor, tag: int) -> None:
        self._posted.append((operation, target, tag))

    def pump(self) -> bool:
        """Empties the cells that are there, as long as somebody waits for a message."""
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
            letter = self._arriving = self._open(tag, num_bytes)
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

    def _open(self, tag: int, num_bytes: int) -> _ArrivingMessage:
        posted = self._take_posted(tag, num_bytes)
        if posted is None:
            return _ArrivingMessage(tag, torch.empty(num_bytes, dtype=torch.uint8), None)
        return _ArrivingMessage(tag, posted[1], posted[0])

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
