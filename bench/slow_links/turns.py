"""Arms that take turns on real links: how long each operation took, and what the cables really carried.

Ranks meet before every operation, outside of the network, so that the counters see the operation alone. An operation
takes as long as the slowest rank says.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.comm.traced import Trace
from slow_links.meeting import Meeting
from slow_links.network import Counters, Network
from slow_links.theory import Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One thing to measure. ``trace`` sees its collectives, whose all-reduces go by ``way``."""

    name: str
    run: Callable[[], None]
    trace: Trace | None = None
    way: Way = "native"
    known_bytes: Mapping[str, float] = field(default_factory=dict)  # of an arm without a trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How often: in each of ``rounds`` rounds every arm runs ``repeats`` times; before that ``warm_up`` times."""

    rounds: int
    repeats: int
    warm_up: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one rank saw of an arm. Bytes are those of one run: of its host's cable, and of the collectives by kind."""

    arm: str
    way: Way
    seconds: tuple[float, ...]
    sent: float
    received: float
    wire: float
    num_bytes: dict[str, float]


class LinkTimer:
    """Times arms on one rank, and reads the counters of its host."""

    def __init__(self, meeting: Meeting, network: Network, host: int) -> None:
        self._meeting = meeting
        self._network = network
        self._host = host

    def measure(self, arms: Sequence[Arm], turns: Turns) -> list[Sample]:
        """Lets the arms take turns, each round starting with another one. All ranks call it."""
        tallies = {arm.name: _Tally() for arm in arms}
        for arm in arms:
            for _ in range(turns.warm_up):
                self._meeting()
                arm.run()
        for number in range(turns.rounds):
            first = number % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                self._turn(arm, turns.repeats, tallies[arm.name])
        return [tallies[arm.name].sample(arm) for arm in arms]

    def _turn(self, arm: Arm, repeats: int, tally: _Tally) -> None:
        self._meeting()  # nobody sends any more
        before = self._network.counters(self._host)
        traced = Counter(arm.trace.num_bytes) if arm.trace is not None else Counter[str]()
        for _ in range(repeats):
            self._meeting()
            start = time.perf_counter()
            arm.run()
            tally.seconds.append(time.perf_counter() - start)
        self._meeting()
        tally.add(before, self._network.counters(self._host))
        if arm.trace is not None:
            tally.num_bytes += arm.trace.num_bytes - traced
            arm.trace.take_waits()


class _Tally:
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.num_bytes: Counter[str] = Counter()
        self._sent = self._received = self._wire = 0

    def add(self, before: Counters, after: Counters) -> None:
        self._sent += after.sent - before.sent
        self._received += after.received - before.received
        self._wire += after.wire - before.wire

    def sample(self, arm: Arm) -> Sample:
        runs = len(self.seconds)
        counted = {kind: size / runs for kind, size in self.num_bytes.items()}
        return Sample(
            arm=arm.name,
            way=arm.way,
            seconds=tuple(self.seconds),
            sent=self._sent / runs,
            received=self._received / runs,
            wire=self._wire / runs,
            num_bytes=counted if arm.trace is not None else dict(arm.known_bytes),
        )


def slowest_rank(samples: Sequence[Sample]) -> list[float]:
    """Returns the seconds of each run, by the rank that took longest."""
    return [max(each) for each in zip(*(sample.seconds for sample in samples), strict=True)]


def median_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the median, and the distance of the quartiles."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return statistics.median(seconds), quartiles[2] - quartiles[0]
