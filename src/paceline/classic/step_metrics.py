"""The numbers of a step, read when somebody asks.

A loss is a tensor on the device and a time lies between two marks on its time line; to read either, the host has to
wait for the device. So a step returns a mapping that holds them unread: who logs every hundredth step waits once in a
hundred steps. On a CPU there is nothing to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paceline.clock import Mark
from paceline.comm.traced import Trace


class StepMetrics(Mapping[str, Any]):
    """A step's metrics: a read-only dict whose values are read from the device on first access, and then kept.

    Where a script has a number, it is the loss: ``total += metrics``, ``sum``, ``metrics.item()``, ``metrics < best``,
    ``float(metrics)``, ``f"{metrics:.3f}"``. Each reads the loss. Two mappings are equal as mappings are.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Takes the values by name; one that can be called is read by calling it."""
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if callable(value):
            value = self._values[name] = value()  # sync point
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._values  # the inherited one would read the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __float__(self) -> float:
        return float(self["loss"])

    item = __float__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(float(self), dtype=dtype)  # else numpy would take the names for a row of texts

    def __add__(self, other: Any) -> Any:
        return float(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return float(self) - other

    def __rsub__(self, other: Any) -> Any:
        return other - float(self)

    def __mul__(self, other: Any) -> Any:
        return float(self) * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return float(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / float(self)

    def __lt__(self, other: Any) -> bool:
        return float(self) < float(other)

    def __gt__(self, other: Any) -> bool:
        return float(self) > float(other)

    def __le__(self, other: Any) -> bool:
        return float(self) <= float(other)

    def __ge__(self, other: Any) -> bool:
        return float(self) >= float(other)

    def __round__(self, digits: int | None = None) -> float:
        return round(float(self), digits)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"StepMetrics({dict(self)})"


class StepTimes:
    """How long a step took, and how long it stood still for communication."""

    __slots__ = ("_end", "_marks", "_seconds")

    def __init__(self, start: Mark, end: Mark, waits: list[tuple[Mark, Mark]]) -> None:
        self._end = end
        self._marks: tuple[Mark, list[tuple[Mark, Mark]]] | None = (start, waits)
        self._seconds = (0.0, 0.0)

    def is_past(self) -> bool:
        """Says whether the times can be read without waiting."""
        return self._marks is None or self._end.is_past()

    def read(self) -> tuple[float, float]:
        """Returns the seconds of the step, and those of them spent waiting. The first call may wait for the device."""
        if self._marks is not None:
            start, waits = self._marks
            waited = sum(end.seconds_since(begin) for begin, end in waits)
            self._seconds = (self._end.seconds_since(start), waited)
            self._marks = None  # an event is a resource of the driver: who keeps metrics need not keep its events
        return self._seconds

    def step_s(self) -> float:
        return self.read()[0]

    def communication_s(self) -> float:
        """Returns the seconds that compute waited for communication: what overlap did not hide."""
        return self.read()[1]

    def compute_s(self) -> float:
        """Returns the seconds of the step without the waits."""
        step_s, waited_s = self.read()
        return step_s - waited_s


class StepTimer:
    """Times steps by marks on the device, and adds them up as the device passes them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._start: Mark = trace.mark()
        self._unread: deque[StepTimes] = deque()
        self._step_s = self._communication_s = 0.0

    def start(self) -> None:
        """Begins a step; waits since the last one, such as those of a checkpoint, belong to none."""
        self._trace.take_waits()
        self._start = self._trace.mark()

    def stop(self) -> StepTimes:
        times = StepTimes(self._start, self._trace.mark(), self._trace.take_waits())
        self._unread.append(times)
        self._add_up(wait=False)
        return times

    def totals(self) -> tuple[float, float]:
        """Returns the seconds of all steps so far, and those of them spent waiting; waits for the device."""
        self._add_up(wait=True)
        return self._step_s, self._communication_s

    def _add_up(self, *, wait: bool) -> None:
        while self._unread and (wait or self._unread[0].is_past()):
            step_s, waited_s = self._unread.popleft().read()
            self._step_s += step_s
            self._communication_s += waited_s
