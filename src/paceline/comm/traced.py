"""A communicator that writes down what passes through it.

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

import torch

from paceline.clock import Clock, DeviceClock, Mark
from paceline.comm.around import AroundCommunicator
from paceline.comm.base import Communicator, ReduceOp, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
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
        self.operations: list[Operation] = []
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

    def add_wait(self, start: Mark, end: Mark) -> None:
        """Notes that the device waited between two marks."""
        self.waits.append((start, end))

    def begin_wait(self) -> Mark | None:
        """Notes that compute stands still from here on. Inside another wait it does already: None."""
        if self._is_waiting:
            return None
        self._is_waiting = True
        return self.mark()

    def end_wait(self, start: Mark | None) -> None:
        """Notes that compute goes on."""
        if start is not None:
            self._is_waiting = False
            self.add_wait(start, self.mark())

    def take_waits(self) -> list[tuple[Mark, Mark]]:
        """Hands over the waits noted since the last call; their times are read when the device is past them."""
        waits = self.waits[:]
        self.waits.clear()
        return waits


class _TracedWork:
    __slots__ = ("_group", "_inner", "_is_noted", "_kind", "_num_bytes", "_start_s", "_trace")

    def __init__(
        self, inner: Work, trace: Trace, kind: str, num_bytes: int, group: tuple[int, ...], start_s: float | None = None
    ) -> None:
        """Without a ``kind`` only the time of waiting is noted."""
        self._inner = inner
        self._trace = trace
        self._kind = kind
        self._num_bytes = num_bytes
        self._group = group
        self._is_noted = False
        self._start_s = time.perf_counter() if start_s is None else start_s

    def wait(self) -> None:
        """Waits, and notes the first time how long the compute stood still."""
        if self._is_noted:
            self._inner.wait()  # from another stream, perhaps
            return
        self._is_noted = True
        start = self._trace.begin_wait()
        try:
            self._inner.wait()
        finally:
            self._trace.end_wait(start)
        if self._trace.keep and self._kind:
            operation = Operation(
                kind=self._kind,
                num_bytes=self._num_bytes,
                group=self._group,
                start_s=self._start_s,
                end_s=time.perf_counter(),
            )
            self._trace.operations.append(operation)


class TracedCommunicator(AroundCommunicator):
    """Passes every verb on to ``inner`` and records it; subgroups share the trace.

    Around a communicator that does more than to pass on, such as one that makes collectives of traced messages, it
    only takes the time of all that is done in there (``counts=False``).
    """

    def __init__(self, inner: Communicator, trace: Trace, *, counts: bool = True) -> None:
        super().__init__(inner)
        self.trace = trace
        self._counts = counts

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Records an all-reduce of the tensor's bytes."""
        return self._record("all_reduce", tensor, self.inner.all_reduce, tensor, op)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Records a reduce-scatter of the whole input's bytes."""
        return self._record("reduce_scatter", tensor, self.inner.reduce_scatter, output, tensor, op)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Records an all-gather of the whole output's bytes."""
        return self._record("all_gather", output, self.inner.all_gather, output, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Records a broadcast."""
        return self._record("broadcast", tensor, self.inner.broadcast, tensor, source)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        """Records an all-to-all of this rank's input."""
        return self._record("all_to_all", tensor, self.inner.all_to_all, output, tensor, output_splits, input_splits)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Records a send."""
        return self._record("send", tensor, self.inner.send, tensor, to, tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Records a receive."""
        return self._record("recv", tensor, self.inner.recv, tensor, source, tag)

    def barrier(self) -> None:
        """Records a barrier as a wait."""
        if self._counts:
            self.trace.count("barrier", 0)
        kind = "barrier" if self._counts else ""
        _TracedWork(_Barrier(self.inner), self.trace, kind, 0, self.ranks).wait()

    def split(self, ranks: Sequence[int]) -> TracedCommunicator:
        """Makes a subgroup that writes into the same trace."""
        return TracedCommunicator(self.inner.split(ranks), self.trace, counts=self._counts)

    def _record(self, kind: str, tensor: torch.Tensor, issue: Callable[..., Work], *arguments: object) -> Work:
        trace = self.trace
        start_s = time.perf_counter()
        start = trace.begin_wait() if trace.times_calls else None
        try:
            work = issue(*arguments)
        finally:
            trace.end_wait(start)
        if not self._counts:
            return _TracedWork(work, trace, "", 0, (), start_s)
        num_bytes = tensor.numel() * tensor.element_size()
        trace.count(kind, num_bytes)
        return _TracedWork(work, trace, kind, num_bytes, self.inner.ranks, start_s)


class _Barrier:
    """A barrier as a work: it is passed in ``wait``."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def wait(self) -> None:
        """Waits for every rank."""
        self._inner.barrier()
