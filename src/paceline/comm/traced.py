"""Communicators that note what passes through them: one counts it, one writes it into the rank's ledger.

Counting is cheap enough to be always on: operations and bytes per kind, and the time that the compute had to wait
(exposed communication), read from marks on the device's own time line without synchronising it. On a CPU that is also
the time of the call that issues an operation: where ranks share memory, much is done in there. With ``keep`` every
operation is kept, with kind, bytes, group, start and end as the host saw them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from paceline.comm.base import DONE, Call, Communicator, Issued, Work, WrappedCommunicator, check_split
from paceline.comm.base import Trace as Trace
from paceline.comm.ledger.file import WAITING
from paceline.comm.ledger.ledger import Ledger, Peer, make_writer

T = TypeVar("T")
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})
_MESSAGES = frozenset({"send", "recv"})


@dataclass(slots=True, eq=False)
class _TracedWork:
    inner: Work
    trace: Trace
    issued: Issued | None
    is_recorded: bool = False

    def wait(self) -> None:
        """Waits; the first time it records how long the compute stood still."""
        if self.is_recorded:
            self.inner.wait()  # from another stream, perhaps
            return
        self.is_recorded = True
        start = self.trace.begin_wait()
        try:
            self.inner.wait()
        finally:
            self.trace.end_wait(start)
        self.trace.finish(self.issued)


class TracedCommunicator(WrappedCommunicator):
    """Passes every verb on to ``inner`` and records it; subgroups share the trace.

    With ``counts=False`` it only takes the time: around what makes collectives of messages that count already.
    """

    trace: Trace

    def __init__(self, inner: Communicator, trace: Trace, *, counts: bool = True) -> None:
        super().__init__(inner)
        self.trace = trace
        self._counts = counts

    def barrier(self) -> None:
        issued = self.trace.issue("barrier", 0, self.ranks) if self._counts else None
        if issued is not None:
            self.trace.count("barrier", 0)
        start = self.trace.begin_wait()
        try:
            self.inner.barrier()
        finally:
            self.trace.end_wait(start)
        self.trace.finish(issued)

    def split(self, ranks: Sequence[int]) -> TracedCommunicator:
        return TracedCommunicator(self.inner.split(ranks), self.trace, counts=self._counts)

    def issue(self, call: Call) -> Work:
        trace, kind, num_bytes = self.trace, call.kind, call.whole.nbytes
        issued = trace.issue(kind, num_bytes, self.ranks) if self._counts else None
        start = trace.begin_wait() if trace.times_calls else None
        try:
            work = self.inner.issue(call)
        finally:
            trace.end_wait(start)
        if issued is not None:
            trace.count(kind, num_bytes)
        return _TracedWork(work, trace, issued)


class LedgerCommunicator(WrappedCommunicator):
    """Passes every verb on to ``inner``, and writes it down before and after; subgroups share the ledger."""

    ledger: Ledger

    def __init__(self, inner: Communicator, ledger: Ledger, *, group: int | None = None) -> None:
        """``group`` is the number of one that the ledger knows already, and in which an operation was issued."""
        super().__init__(inner)
        self.ledger, self.trained = ledger, ledger.trained
        self._group = ledger.add_group(inner.ranks) if group is None else group
        self._messages: Counter[tuple[str, Peer]] = Counter()
        self._cells = ledger.cells
        self._write = make_writer(ledger, self._group, 0 if group is None else 1)

    def barrier(self) -> None:
        self._complete(self.inner.barrier, "barrier")

    def split(self, ranks: Sequence[int]) -> Communicator:
        """Makes a subgroup that writes into the same ledger; making it is the subgroup's first operation."""
        if len(ranks) == 1:
            return self.inner.split(ranks)  # nobody to wait for
        check_split(ranks, self.rank, self.size)
        group = self.ledger.add_group(tuple(self.ranks[rank] for rank in ranks))

        def make() -> Communicator:
            self.ledger.counts[group] = 1  # after the record, as all counters
            return self.inner.split(ranks)

        return LedgerCommunicator(self._complete(make, "split", "", None, 0, group), self.ledger, group=group)

    def issue(self, call: Call) -> Work:
        """Writes down an operation and issues it: until that returns, the rank counts as waiting for it."""
        kind, whole = call.kind, call.whole
        if kind in _REDUCTIONS:
            work = self._write(kind, whole.shape, whole.dtype, call.op)
        elif kind in _MESSAGES:
            peer = (self.ranks[call.peer], call.tag)
            sequence = self._messages[kind, peer]  # a message goes by its kind, peer and tag
            self._messages[kind, peer] = sequence + 1
            work = self._write(kind, whole.shape, whole.dtype, "", peer, sequence)
        else:
            source = (self.ranks[call.peer], 0) if kind == "broadcast" else None
            work = self._write(kind, whole.shape, whole.dtype, "", source)
        try:
            work.inner = self.inner.issue(call)
        finally:
            self._cells[WAITING] = 0
        return work

    def _complete(self, call: Callable[[], T], kind: str, *written: Any) -> T:
        work = self._write(kind, (), None, *written)
        work.inner = DONE
        try:
            found = call()
        finally:
            self._cells[WAITING] = 0
        work.wait()
        return found


def ledger_clock(comm: Communicator) -> Callable[[], float]:
    """Returns the clock of a rank's operations: its virtual clock if it has one, else the host's."""
    return time.perf_counter if comm.clock is None else cast("Callable[[], float]", comm.clock.take)
