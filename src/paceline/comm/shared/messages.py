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


class Ring:
    """The cells of one sender and one receiver."""

    def __init__(
        self, counters: memoryview, headers: list[memoryview], cells: list[torch.Tensor], fence: Fence
    ) -> None:
        self.cell_bytes = cells[0].numel()
        self._counters = counters
        self._headers = headers
        self._cells = cells
        self._fence = fence

    def free(self) -> int | None:
        """Returns the place of the next free cell, for the sender."""
        sent = self._counters[_SENT]
        if sent - self._counters[_TAKEN] >= CELLS:
            return None
        self._fence()
        return sent % CELLS

    def full(self) -> int | None:
        """Returns the place of the next full cell, for the receiver."""
        taken = self._counters[_TAKEN]
        if self._counters[_SENT] <= taken:
            return None
        self._fence()
        return taken % CELLS

    def push(self) -> None:
        """Hands the free cell to the receiver."""
        self._fence()
        self._counters[_SENT] += 1

    def pop(self) -> None:
        """Gives the full cell back to the sender."""
        self._fence()
        self._counters[_TAKEN] += 1

    def header(self, place: int) -> memoryview:
        return self._headers[place]

    def cell(self, place: int, count: int) -> torch.Tensor:
        return self._cells[place][:count]


def send(ring: Ring, message: torch.Tensor, to: int, tag: int) -> Steps:
    """Sends flat bytes."""
    for number, piece in enumerate(torch.split(message, ring.cell_bytes)):  # one empty piece of an empty message
        while (place := ring.free()) is None:
            yield (to,)
        if not number:
            header = ring.header(place)
            header[0], header[1] = tag, message.numel()
        ring.cell(place, piece.numel()).copy_(piece)
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
            tag, num_bytes = self._ring.header(place)[:2]
            letter = self._arriving = self._open(tag, num_bytes)
        piece = letter.content[letter.num_taken : letter.num_taken + self._ring.cell_bytes]
        piece.copy_(self._ring.cell(place, piece.numel()))
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
        for entry in self._posted:
            operation, target, wanted = entry
            if wanted == tag:
                self._check(num_bytes, target, tag)
                self._posted.remove(entry)
                return _ArrivingMessage(tag, target, operation)
        return _ArrivingMessage(tag, torch.empty(num_bytes, dtype=torch.uint8), None)

    def _hand_out(self) -> None:
        for letter in tuple(self._kept):
            for entry in self._posted:
                operation, target, wanted = entry
                if wanted == letter.tag:
                    self._check(letter.content.numel(), target, letter.tag)
                    target.copy_(letter.content)
                    self._posted.remove(entry)
                    self._kept.remove(letter)
                    operation.end()
                    break

    def _check(self, num_bytes: int, target: torch.Tensor, tag: int) -> None:
        if num_bytes != target.numel():
            raise CollectiveMismatchError(
                f"rank {self._source} of the group sends {num_bytes} bytes (tag {tag}), "
                f"this rank receives {target.numel()}\n  a send and its receive have the same shape and dtype"
            )
