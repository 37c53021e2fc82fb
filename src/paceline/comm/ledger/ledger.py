"""A communicator that writes down what it is about to do, where another process can read it.

Always on: an operation costs a record in mapped memory, a look at the callers' frames and a time when it is over, and
no system call; ``python bench ledger`` measures it. ``health/verdict.py`` judges what ledgers say.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from paceline.comm.ledger import file as layout
from paceline.comm.ledger.call_sites import CallSites, LoopCounters, instruction_of
from paceline.comm.ledger.file import ISSUED, NUM_RECORDS, PHASE, RECORD_BYTES, RECORDS_AT, STEP, WAITING
from paceline.health.ledger_view import PHASES
from paceline.health.pairing import Update

_REACH = NUM_RECORDS - 1  # of records that are not overwritten
_NEAR = 32  # records among which the last collective of all ranks is looked for
_NUM_FIRST = 32  # updates that are all noted
_MORE_BITS = 3  # of the number of collectives between notes, beyond those of a step

Peer = tuple[int, int]
"""The other end of an operation: a rank of the world, and a tag."""

CallKey = tuple[str, tuple[int, ...], torch.dtype | None, str, Peer | None]
LocatedCall = tuple[int, int, str, tuple[int, ...], torch.dtype | None, str, Peer | None]
"""The calling instruction, that of the user's code above it in a loop of the user's own, and what was called."""


class NotedWork(Protocol):
    """An operation whose end is written down. Whoever asked for the record adds ``inner``, a ``Work``."""

    inner: Any
    number: int

    def wait(self) -> None:
        """Waits, and notes that it does, and that it is over."""


class Ledger:
    """What one rank has issued, and how far it has come; ``now`` is its clock. Without a path it lies in memory.

    With ``is_own_loop`` engines and optimizers tell of phases and steps, and operations go by the user's line.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        path: Path | None = None,
        now: Callable[[], float] = time.perf_counter,
        is_own_loop: bool = False,
    ) -> None:
        self.path = path
        self.is_own_loop = is_own_loop
        self.buffer = mmap.mmap(-1, layout.FILE_BYTES) if path is None else layout.make_file(path)
        view = memoryview(self.buffer)
        self.cells = view[: layout.COUNTS_AT].cast("Q")
        self.counts = view[layout.COUNTS_AT : layout.RECORDS_AT].cast("Q")
        self.times = view[: layout.TABLE_AT].cast("d")  # those of the records among them
        self.trained = TrainedParameters()
        self.listeners: list[Callable[[str], None]] = []  # hear of the phases of a loop of the user's own
        self.now = now
        self.next_number = count(1).__next__
        self.make_work = work_class(self)
        self.sites = CallSites(lambda number, text: self._append("s", number, text))
        self.calls: dict[CallKey, int] = {}
        self.known: dict[LocatedCall, int] = {}  # call and site; 0 where the instruction is plumbing
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._num_groups = 0
        values = {
            layout.RANK: rank,
            layout.WORLD: world,
            layout.PID: os.getpid(),
            layout.THREAD: threading.get_ident(),
            layout.WALL_NS: time.time_ns(),
            layout.CLOCK_NS: int(now() * 1e9),
            layout.BORN_NS: time.time_ns(),
            layout.MAGIC_CELL: layout.MAGIC,  # last: a reader waits for it
        }
        for place, value in values.items():
            self.cells[place] = value

    def reader(self) -> layout.LedgerReader:
        return layout.LedgerReader(self.buffer)

    def enter(self, phase: str) -> None:
        self.cells[PHASE] = PHASES.index(phase)
        self.cells[layout.LAPS] += 1
        for listener in self.listeners:
            listener(phase)

    def count_step(self) -> None:
        """Notes that a step is over: from the first on, the limit of a step holds."""
        self.cells[STEP] += 1

    def finish(self) -> None:
        self.cells[layout.IS_FINISHED] = layout.FINISHED

    def fail(self) -> None:
        """Notes that the rank leaves with an error of its own, which it tells itself."""
        self.cells[layout.IS_FINISHED] = layout.FAILED

    def last_place(self, newest: int) -> int:
        """Returns call and site of the last collective of all ranks, from operation ``newest`` backwards; 0: none."""
        if self.cells[ISSUED] - newest >= NUM_RECORDS - _NEAR:
            return 0
        for number in range(newest, max(0, newest - _NEAR), -1):
            group, place = layout.GET_PLACE(self.buffer, RECORDS_AT + number % NUM_RECORDS * RECORD_BYTES)
            if group == layout.WORLD_GROUP:
                return int(place)
        return 0

    def note_update(self, update: Update) -> None:
        number, counters = self.cells[layout.UPDATED] + 1, update.counters
        rest = (0,) * (layout.MOST_COUNTERS - len(counters))
        words = (number, update.collectives, update.updates, update.idle, update.place)
        at = layout.UPDATES_AT + number % layout.NUM_UPDATES * layout.UPDATE.size
        layout.UPDATE.pack_into(self.buffer, at, *words, *counters, *rest, *counters.values(), *rest)
        self.cells[layout.UPDATED] = number

    def add_group(self, ranks: tuple[int, ...]) -> int:
        """Names a group; those of the same members differ by the order in which a rank makes them."""
        number = min(self._num_groups, layout.NUM_GROUPS - 1)  # more than anybody makes: those beyond share a place
        self._num_groups += 1
        even = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0] or 1) if len(ranks) > 2 else range(0)
        if tuple(even) == ranks:  # thousands of ranks in a few characters
            self._append("g", number, [[even.start, even.stop, even.step], self._groups[ranks], "even"])
        else:
            self._append("g", number, [list(ranks), self._groups[ranks]])
        self._groups[ranks] += 1
        return number

    def add_call(self, key: CallKey) -> int:
        kind, shape, dtype, op, (peer, tag) = (*key[:4], key[4] or (None, 0))
        number = len(self.calls) + 1
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        if not self._append("c", number, [kind, list(shape), name, op, peer, tag]):
            return 0
        self.calls[key] = number
        return number

    def find_place(self, frame: FrameType, key: LocatedCall, known: int | None) -> int:
        """Returns the numbers of a call and, in the upper four bytes, its site. ``known`` is 0 for plumbing."""
        call_key: CallKey = key[2:]
        user = key[1]
        current = frame.f_back if known == 0 else frame
        while current is not None:
            at = (instruction_of(current), user, *call_key)
            found = self.known.get(at)
            if found is None:
                call, site = self.calls.get(call_key) or self.add_call(call_key), self.sites.number(current, user)
                found = call | site << 32 if site else 0
                if call:  # else the table is full, and shapes that never repeat would fill this one
                    self.known[at] = found
            if found:
                return found
            current = current.f_back
        return self.calls.get(call_key) or self.add_call(call_key)

    def _append(self, kind: str, number: int, value: object) -> bool:
        """Adds a line to the table; False where it is full, as with shapes that never repeat."""
        line = json.dumps([kind, number, value]).encode() + b"\n"
        used = self.cells[layout.TABLE_USED]
        if used + len(line) > layout.TABLE_BYTES:
            return False
        start = layout.TABLE_AT + used
        self.buffer[start : start + len(line)] = line
        self.cells[layout.TABLE_USED] = used + len(line)
        return True


class TrainedParameters:
    """The parameters of engines, which ranks train together. Those that are gone do not count."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # by identity: tensors do not compare to a truth

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        self._known.update((id(each), weakref.ref(each)) for each in parameters)

    def has_any(self) -> bool:
        return bool(self._known)

    def are_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Says whether an optimizer updates them, by its first parameter."""
        first = next(iter(optimizer.param_groups[0]["params"]), None)
        known = self._known.get(id(first))
        return known is not None and known() is first


class UpdateNotes:
    """Counts the updates of one rank, and makes what is noted of some of them.

    Noting costs a hundred microseconds or more. So a rank notes its first updates, then those that are the first after
    a multiple of a number of collectives, between four and eight times that of a step; and whenever the last note is
    ``seldom_s`` old. Ranks that have issued the same collectives note the same updates, but for the last rule.
    """

    def __init__(self, *, seldom_s: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._counters = LoopCounters()
        self._seldom_s, self._now = seldom_s, now
        self._collectives = self._updates = self._idle = 0
        self._noted_s = -math.inf
        self.is_noted = True  # nothing is left to note: the last update was noted, or had no collective before it

    def count(self, collectives: int) -> bool:
        """Counts an update after so many collectives of all ranks; returns whether it is to be noted."""
        new, before = collectives - self._collectives, self._collectives
        self._collectives = collectives
        self._updates += 1
        self.is_noted = new <= 0
        if self.is_noted:
            self._idle += 1
            return False
        if self._updates <= _NUM_FIRST or (before ^ collectives) >> new.bit_length() + _MORE_BITS:
            return True
        return self._now() - self._noted_s >= self._seldom_s

    def note(self, place: int, frame: FrameType | None) -> Update:
        """Returns what is noted of the last update, made by the code at ``frame``; None: that code is left."""
        self._noted_s, self.is_noted = self._now(), True
        counted = {"collectives": self._collectives, "updates": self._updates, "idle": self._idle}
        return Update(**counted, place=place, counters=self._counters.read(frame))

    def name_of(self, counter: int | None) -> str:
        return self._counters.names.get(counter or 0, "")


# [Note: closures] Every operation passes the two functions below. Each of their lines costs some tens of nanoseconds,
# and so does looking a name up in an object; so they make closures, which have what they need at hand.


def work_class(ledger: Ledger) -> Callable[[], NotedWork]:
    """Makes the class of a ledger's works. It has no constructor, which would cost as much as all the rest of one."""
    cells, times, now = ledger.cells, ledger.times, ledger.now
    first, words = layout.DONE_WORD, layout.RECORD_WORDS

    class LedgerWork:
        __slots__ = ("inner", "number")

        inner: Any
        number: int

        def wait(self) -> None:
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
                times[first + number % NUM_RECORDS * words] = now()

    return LedgerWork


def make_writer(ledger: Ledger, group: int, first: int) -> Callable[..., NotedWork]:
    """Makes the function that writes a group's operations down, two calls below the line that it names.

    ``first`` is the number of the next collective. The counters come after the record: see ``file.py``. Without a
    ``sequence`` an operation counts as the group's next collective; ``to`` is another group than the writer's.
    """
    cells, counts, buffer, known_at = ledger.cells, ledger.counts, ledger.buffer, ledger.known.get
    now, next_number, make_work, put = ledger.now, ledger.next_number, ledger.make_work, layout.PUT_RECORD
    frame_at, find_place = sys._getframe, ledger.find_place
    user_of = ledger.sites.user_instruction if ledger.is_own_loop else None
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
        frame = frame_at(3)  # this function, its caller, the verb, and the verb's caller
        user = 0 if user_of is None else user_of(frame)
        key = (id(frame.f_code) + frame.f_lasti, user, kind, shape, dtype, op, peer)  # as ``instruction_of``
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
