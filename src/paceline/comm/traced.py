"""A communicator that counts what passes through it.

Counting is cheap enough to be always on: operations and bytes per kind, and the time that the compute had to wait
(exposed communication), read from marks on the device's own time line without synchronising it. On a CPU that is also
the time of the call that issues an operation: where ranks share memory, much is done in there. With ``keep`` every
operation is kept, with kind, bytes, group, start and end as the host saw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.comm.base import Call, Communicator, Work, WrappedCommunicator
from paceline.comm.trace import Issued
from paceline.comm.trace import Trace as Trace
from paceline.comm.trace import TracedOperation as TracedOperation


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

    Around a communicator that makes collectives of traced messages it only takes the time that is spent in there
    (``counts=False``): the messages count already.
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
