"""The few lines that every operation passes: what writes it down, and what notes its end.

Each of them costs some tens of nanoseconds, and so does looking a name up in an object. So both are closures: what they
need is at hand. ``ledger.py`` says what is written, and ``file.py`` how a reader makes sense of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from paceline.comm.base import Work
from paceline.comm.ledger.file import (
    DONE_WORD,
    ISSUED,
    NUM_RECORDS,
    PHASE,
    PUT_RECORD,
    RECORD_BYTES,
    RECORD_WORDS,
    RECORDS_AT,
    STEP,
    WAITING,
)

if TYPE_CHECKING:
    import torch

    from paceline.comm.ledger.ledger import Ledger

_REACH = NUM_RECORDS - 1  # of records that are not overwritten

Peer = tuple[int, int]
"""The other end of an operation: a rank of the world, and a tag."""

CallKey = tuple[str, tuple[int, ...], "torch.dtype | None", str, Peer | None]
LocatedCall = tuple[int, str, tuple[int, ...], "torch.dtype | None", str, Peer | None]
"""The calling instruction, and what it called."""


class NotedWork(Protocol):
    """An operation whose end is written down. Whoever asked for the record adds ``inner``."""

    inner: Work
    number: int

    def wait(self) -> None:
        """Waits, and notes that it does, and that it is over."""


def work_class(ledger: Ledger) -> Callable[[], NotedWork]:
    """Makes the class of a ledger's works. It has no constructor, which would cost as much as all the rest of one."""
    cells, times, now = ledger.cells, ledger.times, ledger.now

    class LedgerWork:
        __slots__ = ("inner", "number")

        inner: Work
        number: int

        def wait(self) -> None:
            """Waits, and notes that it does, and that it is over."""
            number = self.number
            if not number:  # noted before
                self.inner.wait()  # from another stream, perhaps
                return
            cells[WAITING] = number
            try:
                self.inner.wait()
            finally:
                cells[WAITING] = 0
            self.number = 0
            if cells[ISSUED] - number < _REACH:  # else its place is another's by now
                times[DONE_WORD + number % NUM_RECORDS * RECORD_WORDS] = now()

    return LedgerWork


def make_writer(
    ledger: Ledger, group: int, first: int, find_place: Callable[[FrameType, LocatedCall, int | None], int]
) -> Callable[..., NotedWork]:
    """Makes the function that a group's verbs call themselves: it writes down the line of the verb's caller.

    ``first`` is the number of the next collective. The counters come after the record: see ``file.py``. What is made
    takes the kind, shape, dtype, op and peer of an operation; without a ``sequence`` it counts as the group's next
    collective, and ``to`` is another group than the writer's.
    """
    cells, counts, buffer, known_at = ledger.cells, ledger.counts, ledger.buffer, ledger.known.get
    now, next_number, make_work, put = ledger.now, ledger.next_number, ledger.make_work, PUT_RECORD
    frame_at = sys._getframe
    count = first

    def write(
        kind: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        op: str = "",
        peer: Peer | None = None,
        sequence: int | None = None,
        to: int | None = None,
    ) -> NotedWork:
        nonlocal count
        frame = frame_at(2)
        key = (id(frame.f_code) + frame.f_lasti, kind, shape, dtype, op, peer)  # as ``instruction_of``
        known = known_at(key)
        work = make_work()
        work.number = number = next_number()
        put(
            buffer,
            RECORDS_AT + number % NUM_RECORDS * RECORD_BYTES,
            number,
            count if sequence is None else sequence,
            group if to is None else to,
            cells[PHASE],
            known or find_place(frame, key, known),
            now(),
            cells[STEP],
        )
        cells[ISSUED] = cells[WAITING] = number
        if sequence is None:
            counts[group] = count = count + 1
        return work

    return write
