"""A communicator that writes down what it is about to do, where another process can read it.

Always on: an operation costs two stores into mapped memory and a look at the callers' frames, some two microseconds,
and no system call. When ranks stop making progress, whoever reads the ledgers knows which rank has not come to which
operation (see ``monitor/verdict.py``); the ledger itself judges nothing.

    comm = LedgerCommunicator(comm, Ledger(rank=comm.rank, world=comm.size, path=path))
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import cast

import torch

from paceline.clock import Clock
from paceline.comm import ledger_file as layout
from paceline.comm.around import AroundCommunicator
from paceline.comm.base import Communicator, ReduceOp, Work
from paceline.comm.call_sites import CallSites
from paceline.comm.ledger_file import (
    DONE_AT,
    ISSUED,
    LAPS,
    NUM_GROUPS,
    NUM_RECORDS,
    PHASE,
    PUT_DONE,
    PUT_RECORD,
    RECORD_BYTES,
    RECORDS_AT,
    STEP,
    TABLE_USED,
    WAITING,
)
from paceline.monitor.ledger_view import PHASES

_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}
_CallKey = tuple[str, tuple[int, ...], torch.dtype | None, str, int | None, int]


class Ledger:
    """What one rank has issued, and how far it has come. Without a path it lies in this process's own memory.

    ``now`` gives the times of operations: seconds of any clock of which only differences matter.
    """

    def __init__(
        self, *, rank: int, world: int, path: Path | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.path = path
        self.buffer = mmap.mmap(-1, layout.FILE_BYTES) if path is None else layout.make_file(path)
        view = memoryview(self.buffer)
        self.cells = view[: layout.COUNTS_AT].cast("Q")
        self.counts = view[layout.COUNTS_AT : layout.RECORDS_AT].cast("Q")
        self.now = now
        self.next_number = count(1).__next__
        self.site = CallSites(lambda number, text: self._append("s", number, text)).number
        self.calls: dict[_CallKey, int] = {}
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
        """Returns a reader of this very memory."""
        return layout.LedgerReader(self.buffer)

    def enter(self, phase: str) -> None:
        """Notes what the rank does from here on."""
        self.cells[PHASE] = _PHASE_NUMBERS[phase]
        self.cells[LAPS] += 1

    def count_step(self) -> None:
        """Notes that a step is over: from the first on, the limit of a step holds."""
        self.cells[STEP] += 1

    def finish(self) -> None:
        """Notes that the rank leaves as it should: nobody is to wait for it."""
        self.cells[layout.IS_FINISHED] = 1

    def note_end(self, number: int) -> None:
        """Notes when the wait for an operation returned, unless its place is another's by now."""
        if self.cells[ISSUED] - number < NUM_RECORDS - 1:
            PUT_DONE(self.buffer, DONE_AT + number % NUM_RECORDS * RECORD_BYTES, self.now())

    def add_group(self, ranks: tuple[int, ...]) -> int:
        """Names a group; those of the same members are told apart by the order in which a rank makes them."""
        number = min(self._num_groups, NUM_GROUPS - 1)  # more than anybody makes: those beyond share a place
        self._num_groups += 1
        self._append("g", number, [list(ranks), self._groups[ranks]])
        self._groups[ranks] += 1
        return number

    def add_call(self, key: _CallKey) -> int:
        """Gives a number to a call that was not seen before."""
        kind, shape, dtype, op, peer, tag = key
        number = len(self.calls) + 1
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        if not self._append("c", number, [kind, list(shape), name, op, peer, tag]):
            return 0
        self.calls[key] = number
        return number

    def _append(self, kind: str, number: int, value: object) -> bool:
        """Adds a line to the table; False where it is full, as with shapes that never repeat."""
        line = json.dumps([kind, number, value]).encode() + b"\n"
        used = self.cells[TABLE_USED]
        if used + len(line) > layout.TABLE_BYTES:
            return False
        start = layout.TABLE_AT + used
        self.buffer[start : start + len(line)] = line
        self.cells[TABLE_USED] = used + len(line)
        return True


class _LedgerWork:
    """An operation whose end is written down."""

    __slots__ = ("_inner", "_ledger", "_number")

    def __init__(self, inner: Work, ledger: Ledger, number: int) -> None:
        self._inner = inner
        self._ledger = ledger
        self._number = number

    def wait(self) -> None:
        """Waits, and notes that it does, and that it is over."""
        number, ledger = self._number, self._ledger
        if not number:  # noted before
            self._inner.wait()  # from another stream, perhaps
            return
        cells = ledger.cells
        cells[WAITING] = number
        try:
            self._inner.wait()
        finally:
            cells[WAITING] = 0
        self._number = 0
        if cells[ISSUED] - number < NUM_RECORDS - 1:  # as ``Ledger.note_end``: a call costs as much as what it does
            PUT_DONE(ledger.buffer, DONE_AT + number % NUM_RECORDS * RECORD_BYTES, ledger.now())


class LedgerCommunicator(AroundCommunicator):
    """Passes every verb on to ``inner``, and writes it down before and after; subgroups share the ledger."""

    def __init__(self, inner: Communicator, ledger: Ledger, *, group: int | None = None) -> None:
        """``group`` is the number of one that the ledger knows already, and in which an operation was issued."""
        super().__init__(inner)
        self.ledger = ledger
        self._group = ledger.add_group(inner.ranks) if group is None else group
        self._sequence = 0 if group is None else 1
        self._messages: Counter[tuple[str, int, int]] = Counter()
        self._members = inner.ranks
        # What every operation needs, at one step and not at two.
        self._cells, self._counts, self._buffer = ledger.cells, ledger.counts, ledger.buffer
        self._now, self._next_number, self._site = ledger.now, ledger.next_number, ledger.site
        self._number_of = ledger.calls.get

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Writes down an all-reduce."""
        number = self._write(("all_reduce", tensor.shape, tensor.dtype, op, None, 0))
        try:
            return _LedgerWork(self.inner.all_reduce(tensor, op), self.ledger, number)
        finally:
            self._cells[WAITING] = 0

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Writes down a reduce-scatter, with the whole input's shape."""
        number = self._write(("reduce_scatter", tensor.shape, tensor.dtype, op, None, 0))
        try:
            return _LedgerWork(self.inner.reduce_scatter(output, tensor, op), self.ledger, number)
        finally:
            self._cells[WAITING] = 0

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Writes down an all-gather, with the whole output's shape."""
        number = self._write(("all_gather", output.shape, output.dtype, "", None, 0))
        try:
            return _LedgerWork(self.inner.all_gather(output, tensor), self.ledger, number)
        finally:
            self._cells[WAITING] = 0

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Writes down a broadcast."""
        number = self._write(("broadcast", tensor.shape, tensor.dtype, "", self._peer(source), 0))
        try:
            return _LedgerWork(self.inner.broadcast(tensor, source), self.ledger, number)
        finally:
            self._cells[WAITING] = 0

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        """Writes down an all-to-all, with this rank's input."""
        number = self._write(("all_to_all", tensor.shape, tensor.dtype, "", None, 0))
        try:
            work = self.inner.all_to_all(output, tensor, output_splits, input_splits)
            return _LedgerWork(work, self.ledger, number)
        finally:
            self._cells[WAITING] = 0

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Writes down a send."""
        key = ("send", tensor.shape, tensor.dtype, "", self._peer(to), tag)
        number = self._write(key, self._count_message(key))
        try:
            return _LedgerWork(self.inner.send(tensor, to, tag), self.ledger, number)
        finally:
            self._cells[WAITING] = 0

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Writes down a receive."""
        key = ("recv", tensor.shape, tensor.dtype, "", self._peer(source), tag)
        number = self._write(key, self._count_message(key))
        try:
            return _LedgerWork(self.inner.recv(tensor, source, tag), self.ledger, number)
        finally:
            self._cells[WAITING] = 0

    def barrier(self) -> None:
        """Writes down a barrier."""
        number = self._write(("barrier", (), None, "", None, 0))
        try:
            self.inner.barrier()
        finally:
            self._cells[WAITING] = 0
        self.ledger.note_end(number)

    def split(self, ranks: Sequence[int]) -> Communicator:
        """Makes a subgroup that writes into the same ledger; making it is the subgroup's first operation."""
        if len(ranks) == 1:
            return self.inner.split(ranks)  # nobody to wait for
        members = tuple(map(self._peer, ranks))
        group = self.ledger.add_group(members)
        number = self._write(("split", (), None, "", None, 0), 0, group)
        self._counts[group] = 1
        try:
            made = self.inner.split(ranks)
        finally:
            self._cells[WAITING] = 0
        self.ledger.note_end(number)
        return LedgerCommunicator(made, self.ledger, group=group)

    def _peer(self, rank: int) -> int:
        """Returns a member's rank in the world; one that is not there is left to ``inner`` to refuse."""
        return self._members[rank] if 0 <= rank < len(self._members) else rank

    def _count_message(self, key: _CallKey) -> int:
        """Returns the number of a message, which goes by its kind, peer and tag."""
        pair = (key[0], key[4] or 0, key[5])
        sequence = self._messages[pair]
        self._messages[pair] = sequence + 1
        return sequence

    def _write(self, key: _CallKey, sequence: int | None = None, group: int | None = None) -> int:
        """Writes a record and returns its number; without a ``sequence`` it is the group's next collective.

        The counters come after the record: see ``ledger_file.py``. It is one function, and called by the verbs alone,
        since a call costs a tenth of all.
        """
        cells = self._cells
        number = self._next_number()
        PUT_RECORD(
            self._buffer,
            RECORDS_AT + number % NUM_RECORDS * RECORD_BYTES,
            number,
            self._sequence if sequence is None else sequence,
            self._group if group is None else group,
            cells[PHASE],
            0,
            self._number_of(key) or self.ledger.add_call(key),
            self._site(sys._getframe(2)),
            self._now(),
            0.0,
            cells[STEP],
        )
        cells[ISSUED] = cells[WAITING] = number
        if sequence is None:
            self._sequence = self._counts[self._group] = self._sequence + 1
        return number


def ledger_clock(comm: Communicator) -> Callable[[], float]:
    """Returns the clock of a rank's operations: that of its virtual rank, if it has one, and else the host's."""
    inmost = comm
    while (inner := getattr(inmost, "inner", None)) is not None:
        inmost = inner
    clock: Clock | None = getattr(inmost, "clock", None)
    return time.perf_counter if clock is None else cast("Callable[[], float]", clock.take)


def ledger_of(comm: Communicator) -> Ledger | None:
    """Returns the ledger that a communicator, or one inside it, writes into; None without one."""
    current: Communicator | None = comm
    while current is not None:
        ledger: Ledger | None = getattr(current, "ledger", None)
        if ledger is not None:
            return ledger
        current = getattr(current, "inner", None)
    return None
