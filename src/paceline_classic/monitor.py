"""Numbers of a training loop: read when somebody asks, and logged as lines of JSON and as curves in TensorBoard.

    monitor = DistributedMonitor(log_dir="./logs")
    for batch in loader:
        ...
        monitor.log_training_step(loss=loss, batch_size=32, step_time=0.1, comm_time=0.01)

A loss is a tensor on the device and a time lies between two marks on its time line; to read either, the host has to
wait for the device. So a step returns a mapping that holds them unread: who logs every hundredth step waits once in a
hundred steps.
"""

from __future__ import annotations

import operator
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch

from paceline.clock import DeviceClock, Mark, seconds_between
from paceline.comm.base import Trace
from paceline.comm.torch_dist import launched_rank, launched_ranks
from paceline.free_memory import peak_memory_bytes
from paceline.records.host import open_gpus
from paceline.records.records import EventRecord, StepRecord
from paceline.records.sinks import Fanout, JsonlSink, Sink, TensorBoardSink
from paceline.run.records import end_record, first_record, records_path

_UNKNOWN: dict[str, Any] = dict.fromkeys(("num_parameters", "total_steps", "global_batch", "microbatch"), 0)
_UNKNOWN |= {"strategy": "", "backend": "", "accumulate": 1}


class DistributedMonitor:
    """Logs steps as any run does: ``paceline watch`` and ``paceline report`` read ``log_dir``, of all ranks.

    Each rank writes ``log_dir/records/rank-R.jsonl``, rank 0 curves for TensorBoard as well, with its host's GPUs.
    Nothing is sent. Files are closed when the process ends, or by ``close``. ``rank`` is for where no launcher says it.
    """

    def __init__(self, log_dir: str | Path = "./logs", rank: int | None = None) -> None:
        self.log_dir, self.num_steps, self._num_samples = Path(log_dir), 0, 0
        rank = launched_rank() if rank is None else rank
        self._ranks = max(launched_ranks(), rank + 1)
        path = records_path(self.log_dir, rank)
        sinks: list[Sink] = [JsonlSink(path)]
        if rank == 0:
            try:
                sinks.append(TensorBoardSink(self.log_dir))
            except ImportError:
                warnings.warn(
                    f"DistributedMonitor writes {path} alone: tensorboard is not installed\n"
                    "  for its curves: pip install tensorboard",
                    stacklevel=2,
                )
        self._gpus, self._measured_s = open_gpus()[0] if rank == 0 else None, float("-inf")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._sink, self._last = Fanout(sinks), [0]  # step
        self._sink.write(first_record(rank, self._ranks, self._device, **_UNKNOWN))
        # Once: when asked to, or at the end of the process.
        self.close = weakref.finalize(self, _end, self._sink, self._last, time.time())

    def log_training_step(
        self, loss: SupportsFloat, batch_size: int, step_time: float, comm_time: float = 0.0, step: int | None = None
    ) -> None:
        """Logs a step of this rank: its mean loss, samples, seconds, and those waited for others; counts from 1."""
        self.num_steps = self._last[0] = self.num_steps + 1 if step is None else step
        self._num_samples += batch_size * self._ranks
        record = StepRecord(
            step=self.num_steps,
            epoch=0.0,
            position=self._num_samples,
            loss=float(loss),
            loss_sum=float(loss) * batch_size,
            count=batch_size,
            lr=0.0,
            grad_norm=None,
            samples=batch_size,
            step_s=float(step_time),
            data_s=0.0,
            forward_s=0.0,
            backward_s=0.0,
            comm_s=float(comm_time),
            optimizer_s=0.0,
            samples_per_s=batch_size / step_time if step_time > 0 else 0.0,
            memory_bytes=peak_memory_bytes(self._device),
            time=time.time(),
        )
        self._sink.write(record)
        if self._gpus is not None and time.monotonic() - self._measured_s >= 1.0:
            self._measured_s = time.monotonic()
            self._sink.write(EventRecord(name="scalars", step=record.step, detail=self._gpus.read(), time=record.time))


def _end(sink: Sink, last: list[int], began: float) -> None:
    sink.write(end_record("done", last[0], time.time() - began))
    sink.close()


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
    """Times a trainer's calls, without a wait for the device; logs those that had samples once it has passed them."""

    def __init__(self, device: torch.device, trace: Trace, log: DistributedMonitor | None = None) -> None:
        self.step_s = self.comm_s = 0.0  # of all calls that the device has passed
        self._trace, self._log = trace, log
        self._take = (trace.clock or DeviceClock(device)).take
        self._unread: deque[tuple[int, Mark | float, StepMetrics]] = deque()

    def start(self) -> None:
        self._trace.take_waits()
        self._start = self._take()

    def stop(self, number: int = 0, **values: Any) -> StepMetrics:
        """Ends a call; returns its values with its times."""
        start, end, waits = self._start, self._take(), self._trace.take_waits()

        def waited_s() -> float:
            return sum((seconds_between(*wait) for wait in waits), 0.0)

        values["compute_time"] = lambda: seconds_between(start, end) - waited_s()
        values["communication_time"] = waited_s
        values["step_time"] = lambda: seconds_between(start, end)
        metrics = StepMetrics(values)
        self._unread.append((number, end, metrics))
        self.read_times()
        return metrics

    def read_times(self, *, wait: bool = False) -> None:
        """Reads the times of calls that the device has passed; with ``wait``, of all."""
        while self._unread:
            number, end, metrics = self._unread[0]
            if not (wait or isinstance(end, float) or end.is_past()):
                return
            self._unread.popleft()
            step_s, comm_s = metrics["step_time"], metrics["communication_time"]
            self.step_s, self.comm_s = self.step_s + step_s, self.comm_s + comm_s
            samples = metrics.get("samples", 0)
            if self._log is not None and samples:  # without any there is no loss
                self._log.log_training_step(metrics["loss"], samples, step_s, comm_s, number)

    def close(self) -> None:
        """Logs the rest."""
        self.read_times(wait=True)
        if self._log is not None:
            self._log.close()
