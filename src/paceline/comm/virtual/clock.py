"""A clock for each virtual rank: what a run would take if every rank had a device, and the group a network, of its own.

Ranks take turns, so that the time of the host says nothing about them. Here every rank has a time of its own:

    compute       moves it by what was measured while the rank held the baton, or by what somebody says it takes
    an operation  starts when its last member has come and the one before it in the group is over; it ends a modelled
                  cost later (a message likewise, one behind another from the same sender to the same receiver)
    wait          moves the rank's time to that end, if it is not past it

What is not modelled: two groups that share a wire take nothing from one another. Measured compute is the time of the
rank's own thread; on CUDA it is that of the host between two points at which the device has nothing to do.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from paceline.clock import HostMark
from paceline.errors import UsageError

OperationCost: TypeAlias = Callable[[str, int, tuple[int, ...]], float]  # kind, bytes, ranks in the world -> seconds
SpanRow: TypeAlias = Literal["compute", "wait", "communication"]


def free(*_: object) -> float:
    """A network that costs nothing: only waiting for one another is left."""
    return 0.0


@dataclass(frozen=True, slots=True)
class ClockSpan:
    row: SpanRow
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    ranks: tuple[int, ...] = ()


class VirtualClock:
    """The time of one virtual rank, in seconds since all of them began. Its own thread moves it."""

    def __init__(self, rank: int, device: torch.device, *, measures: bool, factor: float, keep: int) -> None:
        self.rank = rank
        self.now_s = 0.0
        self.spans: deque[ClockSpan] = deque(maxlen=keep)
        self._device, self._is_cuda = device, device.type == "cuda"
        self._measures, self._factor = measures, factor
        self._read = time.perf_counter if self._is_cuda else time.thread_time
        self._since: float | None = None  # reading at which the rank went on computing; None: it does not
        self._segment_s = 0.0  # where the compute that no span tells of yet began
        self._unnamed: list[tuple[float, float]] = []
        self.compute_s = self.wait_s = 0.0
        self.communication_s = 0.0  # that operations it took part in were on their way

    def take(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        self._add_measured()
        return self.now_s

    def mark(self) -> HostMark:
        return HostMark(self.take())

    def spend(self, seconds: float) -> None:
        """Lets the rank compute for so long, besides what is measured; nothing while an operation is carried out."""
        if self._since is not None:
            self._add(seconds)

    def name(self, phase: str) -> None:
        """Names the compute since the last name: it becomes spans."""
        self._add_measured()
        self._close_segment()
        for start_s, end_s in self._unnamed:
            self.spans.append(ClockSpan("compute", phase, start_s, end_s))
        self._unnamed = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._since = self._read() if self._measures else 0.0
        try:
            yield
        finally:
            self._add_measured()
            self._since = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in here costs this rank nothing: it is the network's work, or another rank's."""
        if self._is_cuda and self._measures:
            torch.cuda.synchronize(self._device)
        self._add_measured()
        is_running, self._since = self._since is not None, None
        try:
            yield
        finally:
            if self._is_cuda and self._measures:
                torch.cuda.synchronize(self._device)
            if is_running:
                self._since = self._read() if self._measures else 0.0

    def wait_until(self, moment_s: float, what: str) -> None:
        """Moves the time to the end of what the rank waits for, unless it is past that."""
        if moment_s <= self.now_s:
            return
        self._close_segment()
        self.spans.append(ClockSpan("wait", what, self.now_s, moment_s))
        self.wait_s += moment_s - self.now_s
        self.now_s = self._segment_s = moment_s

    def _add_measured(self) -> None:
        if self._since is not None and self._measures:
            read = self._read()
            self._add(read - self._since)
            self._since = read

    def _add(self, seconds: float) -> None:
        seconds *= self._factor
        self.now_s += seconds
        self.compute_s += seconds

    def _close_segment(self) -> None:
        if self.now_s > self._segment_s:
            self._unnamed.append((self._segment_s, self.now_s))
        self._segment_s = self.now_s


@dataclass(slots=True, kw_only=True)
class VirtualTime:
    """How ``run_virtual`` counts time: costs, who is slow, and how many spans a rank keeps, the newest.

    After the run ``clocks`` has the clock of each rank. ``measures = False`` counts nothing but what is given by
    ``spend``: two runs give the same times then. ``slow`` multiplies a rank's compute, ``slow_links`` the cost of all
    operations that a rank takes part in.
    """

    cost: OperationCost = free
    measures: bool = True
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)
    keep: int = 50_000
    clocks: list[VirtualClock] = field(default_factory=list)

    def start(self, ranks: int, device: torch.device) -> None:
        """Makes the clocks, at zero. Raises UsageError if a slow rank is none of them, or not a number above 0."""
        for name, factors in (("slow", self.slow), ("slow_links", self.slow_links)):
            for rank, factor in factors.items():
                if not 0 <= rank < ranks or not 0 < factor < float("inf"):
                    what = f"{name} = {{{rank}: {factor:g}}}"
                    fix = "give a rank of this run, and 2 for one that takes twice as long"
                    raise UsageError(f"{what}\n  the ranks are 0 to {ranks - 1}, and a factor is above 0\n  {fix}")
        self.clocks = [
            VirtualClock(rank, device, measures=self.measures, factor=self.slow.get(rank, 1.0), keep=self.keep)
            for rank in range(ranks)
        ]

    def carry_out(self, kind: str, num_bytes: int, ranks: tuple[int, ...], start_s: float) -> float:
        """Prices an operation that starts then, and notes it on the clocks of its ranks; returns its end."""
        seconds = self.cost(kind, num_bytes, ranks) if len(ranks) > 1 else 0.0
        seconds *= max(self.slow_links.get(rank, 1.0) for rank in ranks)
        span = ClockSpan("communication", kind, start_s, start_s + seconds, num_bytes, ranks)
        for clock in (self.clocks[rank] for rank in ranks):
            clock.communication_s += span.end_s - span.start_s
            clock.spans.append(span)
        return span.end_s
