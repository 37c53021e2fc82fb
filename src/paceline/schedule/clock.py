"""One clock that events advance: streams run their work in order, and work waits for other work.

Work starts when its stream has finished what it was given before and all that the work waits for is done. So overlap,
prefetch and bubbles come out of the order in which work is issued, as on a device's streams.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    stream: str
    name: str
    start: float
    end: float


class StreamClock:
    """Streams, and the moment up to which each has work. The ranks of a schedule are streams (``grid.walk``)."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: dict[Hashable, float] = {}

    def run(self, stream: Hashable, seconds: float, after: Iterable[float] = ()) -> tuple[float, float]:
        """Puts work at the end of a stream, not before any of the moments ``after``; returns its start and end."""
        start = self._free.get(stream, 0.0)
        for moment in after:
            start = max(start, moment)
        end = self._free[stream] = start + seconds
        return start, end

    def free(self, stream: Hashable) -> float:
        """Returns when a stream has finished all that it was given."""
        return self._free.get(stream, 0.0)

    def occupy(self, stream: Hashable, until: float) -> None:
        self._free[stream] = max(self.free(stream), until)

    @property
    def end(self) -> float:
        return max(self._free.values(), default=0.0)


class Timeline(StreamClock):
    """A clock that adds up how long its streams work, for formulas of overlap."""

    __slots__ = ("_busy",)

    def __init__(self) -> None:
        super().__init__()
        self._busy: dict[str, float] = {}

    def add(self, stream: str, seconds: float, after: Sequence[float] = ()) -> float:
        """Puts work at the end of a stream; it waits for all of ``after``. Returns when it is done."""
        self._busy[stream] = self._busy.get(stream, 0.0) + seconds
        return self.run(stream, seconds, after)[1]

    def busy(self, stream: str) -> float:
        return self._busy.get(stream, 0.0)

    def idle(self, stream: str) -> float:
        """Returns how long a stream stands still before everything is done."""
        return self.end - self.busy(stream)


class RankClock(StreamClock):
    """A rank: its host, which launches what its device computes, and lanes. Numbers, as a replay reads them often."""

    __slots__ = ("compute", "host")

    def __init__(self) -> None:
        super().__init__()
        self.host = self.compute = 0.0

    @property
    def now(self) -> float:
        """When something that is issued now may start: the host has come to it, and so has the device."""
        return max(self.host, self.compute)

    def compute_for(self, seconds: float) -> None:
        self.compute = self.now + seconds

    def issue(self, lane: str, seconds: float) -> float:
        """Starts something on a lane, from where the device has come to; returns its end."""
        return self.run(lane, seconds, (self.now,))[1]

    def wait(self, end: float) -> None:
        self.compute = max(self.compute, end)

    def work_on_host(self, seconds: float, after: Iterable[float] = ()) -> None:
        """Lets the host work itself, once what it waits for is there."""
        self.host = max(self.host, *after, 0.0) + seconds


def time_in_all(*kinds: Sequence[tuple[float, float]]) -> float:
    """Returns how long an interval of every kind was under way at once; those of one kind may overlap."""
    edges = [
        (moment, change, kind)
        for kind, intervals in enumerate(kinds)
        for interval in intervals
        for moment, change in zip(interval, (-1, 1), strict=True)  # in order: at one moment, starts before ends
    ]
    under_way, since_s, found = [0] * len(kinds), 0.0, []
    for moment, change, kind in sorted(edges):
        was_in_all = all(under_way)
        under_way[kind] -= change
        if all(under_way) and not was_in_all:
            since_s = moment
        elif was_in_all and not all(under_way):
            found.append(moment - since_s)
    return sum(found)
