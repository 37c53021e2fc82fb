"""A communicator that writes every operation of a rank into its ledger, before and after it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from paceline.comm.base import DONE, Call, Communicator, Work, WrappedCommunicator, check_split
from paceline.comm.ledger.file import WAITING
from paceline.comm.ledger.ledger import Ledger, Peer, make_writer

T = TypeVar("T")
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})
_MESSAGES = frozenset({"send", "recv"})


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
        """Writes down an operation that is over when ``call`` returns."""
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
