"""The numbers of a step, read when somebody asks.

A loss is a tensor on the device and a time lies between two marks on its time line; to read either, the host has to
wait for the device. So a step returns a mapping that holds them unread: who logs every hundredth step waits once in a
hundred steps. On a CPU there is nothing to wait for.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from paceline.classic.monitor import DistributedMonitor
from paceline.records.meter import StepMeter
from paceline.records.records import StepRecord
from paceline.train.step import StepOutcome, StepResult


def _of_loss(calculate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes an operator of metrics, which calculates with their loss."""
    return lambda metrics, other: calculate(float(metrics), other)


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

    __add__ = __radd__ = _of_loss(operator.add)
    __mul__ = __rmul__ = _of_loss(operator.mul)
    __sub__, __rsub__ = _of_loss(operator.sub), _of_loss(lambda loss, other: other - loss)
    __truediv__, __rtruediv__ = _of_loss(operator.truediv), _of_loss(lambda loss, other: other / loss)
    __lt__, __gt__ = _of_loss(operator.lt), _of_loss(operator.gt)
    __le__, __ge__ = _of_loss(operator.le), _of_loss(operator.ge)

    def __round__(self, digits: int | None = None) -> float:
        return round(float(self), digits)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"StepMetrics({dict(self)})"


class TimedCalls:
    """Times the calls of a trainer by a meter, which knows a time when the device has passed it; none waits for it.

    With a ``log``, calls that had samples are logged then, and the rest when it is closed.
    """

    def __init__(self, meter: StepMeter, log: DistributedMonitor | None = None) -> None:
        self.step_s = self.comm_s = 0.0  # of all calls that the device has passed
        self.start = meter.start
        self._meter = meter
        self._log = log
        self._nothing = StepOutcome(loss_sum=torch.zeros(()), count=0.0, grad_norm=torch.zeros(()))
        self._waiting: deque[tuple[list[StepRecord], StepMetrics]] = deque()

    def stop(self, number: int = 0, **values: Any) -> StepMetrics:
        """Ends a call; returns its values with its times."""
        times: list[StepRecord] = []

        def read() -> StepRecord:
            if not times:
                self.settle(wait=True)  # sync point
            return times[0]

        values["compute_time"] = lambda: read().step_s - read().comm_s
        values["communication_time"] = lambda: read().comm_s
        values["step_time"] = lambda: read().step_s
        metrics = StepMetrics(values)
        self._meter.finish(StepResult(number, 0, [], 0.0, self._nothing, 1, is_last=False))
        self._waiting.append((times, metrics))
        self.settle()
        return metrics

    def settle(self, *, wait: bool = False) -> None:
        """Reads the times of calls that the device has passed; with ``wait``, of all."""
        for record in self._meter.drain(wait=wait):
            times, metrics = self._waiting.popleft()
            times.append(record)
            self.step_s += record.step_s
            self.comm_s += record.comm_s
            samples = metrics.get("samples", 0)
            if self._log is not None and samples:  # without any there is no loss
                self._log.log_training_step(metrics["loss"], samples, record.step_s, record.comm_s, record.step)

    def close(self) -> None:
        """Logs the rest."""
        self.settle(wait=True)
        if self._log is not None:
            self._log.close()
