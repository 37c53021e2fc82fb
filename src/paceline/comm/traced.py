"""A communicator that counts what passes through it.

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
from typing import TypeAlias

import torch

from paceline.clock import Clock, DeviceClock, Mark
from paceline.comm.base import Communicator, Work
from paceline.comm.group import WrappedCommunicator

_Issued: TypeAlias = tuple[str, int, tuple[int, ...], float]  # kind, bytes, group, when


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperation:
    """One operation of one rank. ``end_s`` is when this rank's wait for it returned."""

    kind: str
    num_bytes: int
    group: tuple[int, ...]
    start_s: float
    end_s: float


class Trace:
    """What a rank's communicators did: totals always, single operations on request."""

    def __init__(self, device: torch.device, *, keep: bool = False, clock: Clock | None = None) -> None:
        """Reads the time of ``clock``; None: of the device."""
        self.keep = keep
        self.clock = clock
        self.operations: list[TracedOperation] = []
        self.num_operations: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._clock = DeviceClock(device) if clock is None else clock
        self._is_waiting = False
        self.times_calls = device.type == "cpu"  # elsewhere they take time of the host, and none of the device
        self.waits: list[tuple[Mark, Mark]] = []  # always the same list: a meter looks at its length

    def count(self, kind: str, num_bytes: int) -> None:
        """Counts an operation as it is issued."""
        self.num_operations[kind] += 1
        self.num_bytes[kind] += num_bytes

    def mark(self) -> Mark:
        """Takes a mark on the device."""
        return self._clock.mark()

    def begin_wait(self) -> Mark | None:
        """Marks where the compute begins to wait; None where it waits already."""
        if self._is_waiting:
            return None
        self._is_waiting = True
        return self.mark()

    def end_wait(self, start: Mark | None) -> None:
        """Records a wait of the compute, which goes on."""
        if start is not None:
            self._is_waiting = False
            self.waits.append((start, self.mark()))

    def take_waits(self) -> list[tuple[Mark, Mark]]:
        """Returns the waits since the last call; their times are read when the device is past them."""
        waits = self.waits[:]
        self.waits.clear()
        return waits

    def finish(self, issued: _Issued | None) -> None:
        """Keeps an operation that has ended, if operations are kept."""
        if self.keep and issued is not None:
            kind, num_bytes, group, start_s = issued
            end_s = time.perf_counter()
            self.operations.append(
                TracedOperation(kind=kind, num_bytes=num_bytes, group=group, start_s=start_s, end_s=end_s)
            )


class _TracedWork:
    """A work whose first wait is recorded, with the operation that it ends."""

    __slots__ = ("_inner", "_is_recorded", "_issued", "_trace")

    def __init__(self, inner: Work, trace: Trace, issued: _Issued | None) -> None:
        """Without ``issued`` only the wait is recorded, and no operation."""
        self._inner = inner
        self._trace = trace
        self._issued = issued
        self._is_recorded = False

    def wait(self) -> None:
        """Waits; the first time it records how long the compute stood still."""
        if self._is_recorded:
            self._inner.wait()  # from another stream, perhaps
            return
        self._is_recorded = True
        start = self._trace.begin_wait()
        try:
            self._inner.wait()
        finally:
            self._trace.end_wait(start)
        self._trace.finish(self._issued)


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
        """Records a barrier as a wait."""
        issued = ("barrier", 0, self.ranks, time.perf_counter()) if self._counts else None
        if issued is not None:
            self.trace.count("barrier", 0)
        start = self.trace.begin_wait()
        try:
            self.inner.barrier()
        finally:
            self.trace.end_wait(start)
        self.trace.finish(issued)

    def split(self, ranks: Sequence[int]) -> TracedCommunicator:
        """Makes a subgroup that is recorded in the same trace."""
        return TracedCommunicator(self.inner.split(ranks), self.trace, counts=self._counts)

    def _pass_on(self, kind: str, whole: torch.Tensor, verb: Callable[..., Work], *arguments: object) -> Work:
        trace, start_s = self.trace, time.perf_counter()
        start = trace.begin_wait() if trace.times_calls else None
        try:
            work = verb(*arguments)
        finally:
            trace.end_wait(start)
        if not self._counts:
            return _TracedWork(work, trace, None)
        trace.count(kind, whole.nbytes)
        return _TracedWork(work, trace, (kind, whole.nbytes, self.ranks, start_s))
