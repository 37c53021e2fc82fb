"""What a rank's communicators did: operations and bytes by kind, and how long the compute waited for them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import torch

from paceline.clock import Clock, DeviceClock, Mark

Issued: TypeAlias = tuple[str, int, tuple[int, ...], float]  # kind, bytes, group, when


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
        """Records a wait of the compute, which goes on."""
        if start is not None:
            self._is_waiting = False
            self.waits.append((start, self.mark()))

    def take_waits(self) -> list[tuple[Mark, Mark]]:
        """Returns the waits since the last call; their times are read when the device is past them."""
        waits = self.waits[:]
        self.waits.clear()
        return waits

    def finish(self, issued: Issued | None) -> None:
        """Keeps an operation that has ended, if operations are kept."""
        if self.keep and issued is not None:
            kind, num_bytes, group, start_s = issued
            end_s = time.perf_counter()
            self.operations.append(
                TracedOperation(kind=kind, num_bytes=num_bytes, group=group, start_s=start_s, end_s=end_s)
            )
