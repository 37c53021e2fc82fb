"""What a rank's communicators did: operations and bytes by kind, and how long the compute waited for them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import torch

from paceline.clock import Clock, DeviceClock, Mark, seconds_between

_MOST_ENDED = 4096

Issued: TypeAlias = tuple[str, int, tuple[int, ...], float, Mark | float]
"""An operation on its way: kind, bytes, group, and when it was issued, as the host and as the device has it."""


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One operation of one rank. ``end_s`` is when this rank's wait for it returned."""

    kind: str
    num_bytes: int
    group: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class GroupTotal:
    """The operations of one kind in one group that have ended: how many, their bytes, their seconds added up."""

    kind: str
    group: tuple[int, ...]
    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Trace:
    """What a rank's communicators did: totals always, single operations on request."""

    def __init__(self, device: torch.device, *, keep: bool = False, clock: Clock | None = None) -> None:
        """Reads the time of ``clock``; None: of the device."""
        self.keep, self.clock = keep, clock
        self.operations: list[TracedOperation] = []
        self.num_operations: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._clock = DeviceClock(device) if clock is None else clock
        self._is_waiting = False
        self.times_calls = device.type == "cpu"  # elsewhere they take time of the host, and none of the device
        self.waits: list[tuple[Mark, Mark]] = []  # always the same list: a meter looks at its length
        self.adds_up = False  # by kind and group, for whoever takes the totals
        self._totals: dict[tuple[str, tuple[int, ...]], GroupTotal] = {}
        self._ended: list[tuple[Issued, Mark | float]] = []  # not in the totals yet

    def count(self, kind: str, num_bytes: int) -> None:
        self.num_operations[kind] += 1
        self.num_bytes[kind] += num_bytes

    def mark(self) -> Mark:
        return self._clock.mark()

    def begin_wait(self) -> Mark | None:
        """Marks where the compute begins to wait; None where it waits already."""
        if self._is_waiting:
            return None
        self._is_waiting = True
        return self.mark()

    def end_wait(self, start: Mark | None) -> None:
        if start is not None:
            self._is_waiting = False
            self.waits.append((start, self.mark()))

    def take_waits(self) -> list[tuple[Mark, Mark]]:
        """Returns the waits since the last call; their times are read when the device is past them."""
        waits = self.waits[:]
        self.waits.clear()
        return waits

    def issue(self, kind: str, num_bytes: int, group: tuple[int, ...]) -> Issued:
        start_s = time.perf_counter()
        takes_mark = self.adds_up and len(group) > 1 and not (self.times_calls and self.clock is None)
        return kind, num_bytes, group, start_s, self._clock.take() if takes_mark else start_s

    def take_totals(self, *, wait: bool = False) -> list[GroupTotal]:
        """Returns what ended since the last call and the device has passed; with ``wait``, all that ended."""
        self._add_up(wait=wait)
        totals, self._totals = self._totals, {}
        return list(totals.values())

    def _add_up(self, *, wait: bool) -> None:
        ended, self._ended = self._ended, []
        for place, ((kind, num_bytes, group, _, start), end) in enumerate(ended):
            if not (wait or isinstance(end, float) or end.is_past()):
                self._ended = ended[place:]
                break
            total = self._totals.get((kind, group))
            if total is None:
                total = self._totals[kind, group] = GroupTotal(kind=kind, group=group)
            total.calls += 1
            total.num_bytes += num_bytes
            total.seconds += seconds_between(start, end)

    def finish(self, issued: Issued | None) -> None:
        if issued is None:
            return
        if self.adds_up and len(issued[2]) > 1:
            self._ended.append((issued, self._clock.take()))
            if len(self._ended) >= _MOST_ENDED:  # nobody has asked for long
                self._add_up(wait=False)
        if self.keep:
            self.operations.append(TracedOperation(*issued[:4], time.perf_counter()))
