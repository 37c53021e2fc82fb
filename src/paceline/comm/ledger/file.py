"""A ledger's bytes: a header of counters, a ring of records of one size, and a table of what they name.

    cells      64 numbers of 8 bytes: who writes, its phase and step, how many operations it issued, where it waits
    counts     collectives issued, per group
    records    the last operations: number, place in the group, phase, call, call site, issued, done
    table      JSON lines that are only ever added to: groups, calls and call sites by number
    updates    the last updates of optimizers in a loop of the user's own (``health/pairing.py``)

The file is mapped into memory: writing is a store, without a system call, and what was written is there for another
process at once, and after the writer's death. A reader goes by the counter of issued operations, which is written
after the record; a record that is overwritten while it is read carries another number, and is left out.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.health.ledger_view import PHASES, GroupName, LedgerCall, LedgerEntry, LedgerView, State
from paceline.health.pairing import Update
from paceline.health.straggler import PhaseTimes

MAGIC: Final = 0x314C_4544_4745_5231
NUM_CELLS: Final = 64
NUM_GROUPS: Final = 1024
NUM_RECORDS: Final = 1024
RECORD: Final = struct.Struct("<QIHBBIIddI4x")
RECORD_BYTES: Final = RECORD.size
PUT_RECORD: Final = struct.Struct("<QIHBxQd8xI4x").pack_into  # call and site as one: each value has its price
COUNTS_AT: Final = NUM_CELLS * 8
RECORDS_AT: Final = COUNTS_AT + NUM_GROUPS * 8
RECORD_WORDS: Final = RECORD_BYTES // 8
DONE_WORD: Final = (RECORDS_AT + 32) // 8  # of the first record's last time
TABLE_AT: Final = RECORDS_AT + NUM_RECORDS * RECORD_BYTES
TABLE_BYTES: Final = 2**17
UPDATES_AT: Final = TABLE_AT + TABLE_BYTES
NUM_UPDATES: Final = 32
MOST_COUNTERS: Final = 6  # of an update
# Number, collectives, updates, idle, place; counters and their values.
UPDATE: Final = struct.Struct(f"<{5 + 2 * MOST_COUNTERS}Q")
GET_PLACE: Final = struct.Struct("<12xH2xQ").unpack_from  # of a record: its group; its call and site as one
FILE_BYTES: Final = UPDATES_AT + NUM_UPDATES * UPDATE.size

MAGIC_CELL, RANK, WORLD, PID, TABLE_USED, IS_FINISHED, PHASE, STEP = range(8)
ISSUED, WAITING, LAPS, THREAD, WALL_NS, CLOCK_NS, BORN_NS, HEARTBEAT = range(8, 16)
TIMED_STEPS, STEP_NS, DATA_NS, FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = range(16, 22)  # sums over so many timed steps
UPDATED: Final = 22  # the number of the last update that was noted
WORLD_GROUP: Final = 0  # the number of the first group of a ledger: all ranks
FINISHED, FAILED = 1, 2  # how a rank has left, in IS_FINISHED
_PHASE_CELLS = {"data": DATA_NS, "forward": FORWARD_NS, "backward": BACKWARD_NS, "optimizer": OPTIMIZER_NS}
_COUNTERS = (ISSUED, WAITING, LAPS)


def ledger_path(folder: Path, rank: int) -> Path:
    return folder / "health" / f"rank-{rank}.ledger"


def make_file(path: Path) -> mmap.mmap:
    """Makes an empty ledger under its name, whole or not at all; readers of an older one keep that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        left = memoryview(bytes(FILE_BYTES))
        while left:  # all of its space now: a hole in a mapped file that a full disk cannot fill later is a SIGBUS
            left = left[os.write(descriptor, left) :]
        mapped = mmap.mmap(descriptor, FILE_BYTES)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return mapped


class Pulse(NamedTuple):
    is_finished: bool  # the rank has left, as it should or with an error of its own
    phase: str
    step: int  # how many steps it has made in this attempt
    counters: tuple[int, ...]


class LedgerReader:
    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._cells = memoryview(buffer)[:COUNTS_AT].cast("Q")
        self._counts = memoryview(buffer)[COUNTS_AT:RECORDS_AT].cast("Q")
        self.rank, self.pid = self._cells[RANK], self._cells[PID]  # of the writer
        self.thread = self._cells[THREAD]  # in which the rank runs
        self._read_bytes = 0
        self._tables: dict[str, dict[int, Any]] = {"g": {}, "c": {}, "s": {}}

    @classmethod
    def open(cls, path: Path) -> LedgerReader | None:
        """Opens a rank's file; None where there is none yet, or it is not complete."""
        try:
            with path.open("rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, ValueError):
            return None
        if len(buffer) != FILE_BYTES or int.from_bytes(buffer[:8], "little") != MAGIC:
            return None
        return cls(buffer)

    @property
    def heartbeat(self) -> int:
        return self._cells[HEARTBEAT]

    def times(self) -> PhaseTimes:
        """Returns what the rank's steps have taken so far, as far as it has measured them."""
        cells = self._cells
        phases = {phase: cells[place] / 1e9 for phase, place in _PHASE_CELLS.items()}
        return PhaseTimes(steps=cells[TIMED_STEPS], step_s=cells[STEP_NS] / 1e9, phases=phases)

    def pulse(self) -> Pulse:
        """Returns what changes with every operation and phase. Costs a microsecond."""
        cells = self._cells
        counters = tuple([cells[place] for place in _COUNTERS])
        return Pulse(bool(cells[IS_FINISHED]), _phase(cells[PHASE]), cells[STEP], counters)

    def view(self, *, state: State = "running", changed_s: float = 0.0, last: int = 96, host: str = "") -> LedgerView:
        cells, newest = self._cells, self._cells[ISSUED]
        numbers = range(max(1, newest - min(last, NUM_RECORDS - 1) + 1), newest + 1)
        places = [(number, RECORDS_AT + number % NUM_RECORDS * RECORD_BYTES) for number in numbers]
        found = [raw for number, at in places if (raw := RECORD.unpack_from(self._buffer, at))[0] == number]
        self._read_table()  # which by now names all that was found
        return LedgerView(
            rank=self.rank,
            state=_ENDS.get(cells[IS_FINISHED], state),
            phase=_phase(cells[PHASE]),
            step=cells[STEP],
            entries=tuple(self._entry(*raw) for raw in found if raw[2] in self._tables["g"]),
            issued={name: self._counts[each] for each, name in self._tables["g"].items() if each < NUM_GROUPS},
            waiting=cells[WAITING] or None,
            changed_s=changed_s,
            host=host,
            pid=self.pid,
        )

    def update_at(self, collectives: int) -> Update | None:
        """Returns the update that the rank noted after so many collectives; None where it is not there."""
        newest = self._cells[UPDATED]
        for number in range(newest, max(0, newest - NUM_UPDATES + 1), -1):
            words = UPDATE.unpack_from(self._buffer, UPDATES_AT + number % NUM_UPDATES * UPDATE.size)
            if words[0] != number or words[1] < collectives:
                return None
            if words[1] == collectives:
                names, values = words[5 : 5 + MOST_COUNTERS], words[5 + MOST_COUNTERS :]
                counters = {name: value for name, value in zip(names, values, strict=True) if name}
                known = dict(zip(("collectives", "updates", "idle", "place"), words[1:5], strict=True))
                return Update(**known, counters=counters)
        return None

    def collective_before(self, update: Update) -> LedgerEntry | None:
        """Returns the last collective of all ranks before one of this rank's updates; None where it is not known."""
        self._read_table()
        call = self._tables["c"].get(update.place & 0xFFFF_FFFF)
        if call is None:
            return None
        group, site = self._tables["g"][WORLD_GROUP], self._tables["s"].get(update.place >> 32, "")
        return LedgerEntry(number=0, group=group, sequence=update.collectives - 1, call=call, site=site)

    def _entry(self, number: int, sequence: int, group: int, phase: int, *more: Any) -> LedgerEntry:
        _, call, site, issued_s, done_s, step = more
        return LedgerEntry(
            number=number,
            group=self._tables["g"][group],
            sequence=sequence,
            call=self._tables["c"].get(call, _UNKNOWN),
            site=self._tables["s"].get(site, ""),
            phase=_phase(phase),
            step=step,
            issued_s=issued_s,
            done_s=done_s or None,
        )

    def _read_table(self) -> None:
        used = min(self._cells[TABLE_USED], TABLE_BYTES)
        new = self._buffer[TABLE_AT + self._read_bytes : TABLE_AT + used]
        for line in new.splitlines():
            kind, number, value = json.loads(line)
            self._tables[kind][number] = _DECODE[kind](value)
        self._read_bytes = used


def _phase(number: int) -> str:
    return PHASES[number] if number < len(PHASES) else ""


_ENDS: dict[int, State] = {FINISHED: "finished", FAILED: "failed"}
_UNKNOWN = LedgerCall(kind="an operation")  # of a table that is full
_CALL_FIELDS = ("kind", "shape", "dtype", "op", "peer", "tag")
_DECODE: dict[str, Callable[[Any], Any]] = {
    "g": lambda value: GroupName(tuple(range(*value[0]) if len(value) > 2 else value[0]), value[1]),
    "c": lambda value: LedgerCall(**dict(zip(_CALL_FIELDS, (value[0], tuple(value[1]), *value[2:]), strict=True))),
    "s": str,
}
