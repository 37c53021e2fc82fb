"""Where records go: a file of lines, TensorBoard, a log for people, or several places at once.

A sink is called from the training loop, so it must be cheap: between two matrix products that have emptied the caches,
every function called costs tens of microseconds. So a sink is handed many steps at once; ``JsonlSink`` only keeps them,
and turns all of a second into lines together; ``TensorBoardSink`` writes one event with all scalars of a step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from paceline.records import records as kinds
from paceline.records.event_words import event_name, event_text
from paceline.records.thin import thin_lines
from paceline.units import format_count

_MOST_KEPT = 100_000
_WARNINGS = ("skipped", "straggler", "roll_back", "experts")
_Clock = Callable[[], float]
_Stepped = kinds.StepRecord | kinds.EvalRecord | kinds.EventRecord | kinds.CommRecord | kinds.ExpertsRecord


class Sink(Protocol):
    """A place that records go to."""

    def write(self, *records: kinds.Record) -> None:
        """Takes records, in their order; may keep them in memory until the next flush."""

    def flush(self) -> None:
        """Hands over what was kept."""

    def close(self) -> None:
        """Flushes and lets go of files and screens. Safe to call twice."""


class JsonlSink:
    """Appends records to a file, one line each. Several threads may write.

    Steps and communication are kept in memory for ``flush_every_s`` at most, measured when the next records come; any
    other record is written through at once, with those before it. A full disk leaves whole lines. What it does not take
    is lost with an error, or with ``waits_for_space`` tried again with the next: the last 100,000 records of it. With
    ``most``, older steps are added up so that about so many lines of them stay (``thin.py``).
    """

    def __init__(
        self,
        path: Path,
        *,
        flush_every_s: float = 1.0,
        clock: _Clock = time.monotonic,
        waits_for_space: bool = False,
        most: int | None = None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._most = path, most
        self._period = self._num_samples = 0
        self._file = path.open("ab", buffering=0)
        _cut_unterminated_line(path)
        self._lock = Lock()
        # Kept here and not in the file object's buffer: a forked loader worker would write its copy of that out again.
        self._kept: list[kinds.Record] = []
        self._flush_every_s, self._clock, self._flushed_at = flush_every_s, clock, clock()
        self._waits_for_space = waits_for_space

    def write(self, *records: kinds.Record) -> None:
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self._file.name} is closed; write records before closing the sink")
            self._kept += records
            is_time = self._clock() - self._flushed_at >= self._flush_every_s
            if is_time or not all(
                isinstance(record, kinds.StepRecord | kinds.CommRecord | kinds.ExpertsRecord) for record in records
            ):
                self._write_out()

    def flush(self) -> None:
        with self._lock:
            self._write_out()

    def close(self) -> None:
        with self._lock:
            self._write_out()
            self._file.close()

    def _write_out(self) -> None:
        self._flushed_at = self._clock()
        if self._kept:
            kept, self._kept = self._kept, []  # let go of first: a record that cannot be written fails once
            try:
                self._append("".join(map(kinds.to_line, kept)).encode())
            except OSError as error:
                if not (self._waits_for_space and is_disk_full(error)):
                    raise
                self._kept = kept[-_MOST_KEPT:]
            self._thin(kept)

    def _thin(self, written: Sequence[kinds.Record]) -> None:
        """Adds up older records, at the same steps on all ranks. A disk without room for the new file keeps the old."""
        self._num_samples += sum(isinstance(each, kinds.HostRecord) for each in written)
        step = next((each.step for each in reversed(written) if isinstance(each, kinds.StepRecord)), self._num_samples)
        if self._most is None or step // (self._most // 2) == self._period:
            return
        self._period = step // (self._most // 2)
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)  # whoever adds an event waits, and opens the new file
            if (data := thin_lines(self._path.read_bytes(), self._most)) is not None:
                try:
                    partial.write_bytes(data)
                    old, self._file = self._file, partial.open("ab", buffering=0)
                    partial.replace(self._path)
                    old.close()
                finally:
                    partial.unlink(missing_ok=True)

    def _append(self, lines: bytes) -> None:
        end, left = os.fstat(self._file.fileno()).st_size, memoryview(lines)
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._file.truncate(end)
            raise


def is_disk_full(error: OSError) -> bool:
    """Says whether there is no space, or none for this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class TensorBoardSink:
    """Writes scalars and histograms to a TensorBoard folder; a new start at an attempt's first step makes one curve."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            # TensorBoard's own imports warn about deprecated calls between third parties, which no user can mend.
            warnings.simplefilter("ignore")
            from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        folder.mkdir(parents=True, exist_ok=True)
        # Not TensorBoard's own writer: its thread would print a traceback where the disk is full.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("wb")
        self._writer: Any = RecordWriter(self._file)
        self._writer.write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._value = summary_pb2.Summary.Value
        self._lock = Lock()
        self._has_started = False

    def write(self, *records: kinds.Record) -> None:
        with self._lock:
            for record in records:
                if isinstance(record, kinds.RunRecord):
                    self._has_started = False  # steps may come again
                elif isinstance(record, kinds.EventRecord) and record.name == "histogram":
                    self._write_values(record, list(self._histograms(record.detail)))
                elif isinstance(record, _Stepped) and (values := list(scalars(record))):
                    self._write_values(record, [self._value(tag=tag, simple_value=x) for tag, x in values])
            self._file.flush()  # somebody may be looking

    def flush(self) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write_values(self, record: _Stepped, values: list[Any]) -> None:
        if not self._has_started:
            self._has_started = True
            self._add(record, session_log=self._events.SessionLog(status=self._events.SessionLog.START))
        self._add(record, summary=self._summaries.Summary(value=values))

    def _histograms(self, detail: dict[str, Any]) -> Iterator[Any]:
        for kind in ("weights", "gradients"):
            found = detail[kind]
            if found is None or not found["count"]:
                continue
            total = {"num": found["count"], "sum": found["mean"] * found["count"], "sum_squares": found["norm"] ** 2}
            buckets = {"bucket_limit": found["edges"][1:], "bucket": found["counts"]}
            histogram = self._summaries.HistogramProto(min=found["min"], max=found["max"], **total, **buckets)
            yield self._value(tag=f"{kind}/{detail['parameter']}", histo=histogram)

    def _add(self, record: _Stepped, **content: Any) -> None:
        event = self._events.Event(step=record.step, wall_time=record.time, **content)
        self._writer.write(event.SerializeToString())


class StepChoice:
    """Chooses steps to show: the first, each n-th, two a second at most, and ``points`` evenly spaced ones."""

    def __init__(self, every: int, *, points: int = 0, least_s: float = 0.5) -> None:
        self._every, self._points, self._least_s = every, points, least_s
        self.begin(0)

    def begin(self, total_steps: int) -> None:
        """Starts an attempt of a run of so many steps."""
        self._stride = max(1, -(-total_steps // self._points)) if self._points else 0
        self._last_time = float("-inf")
        self._is_first = True

    def is_due(self, step: int, time_s: float) -> bool:
        """Says whether a step that ended at this time is shown."""
        is_point = self._stride > 0 and step % self._stride == 0
        is_late = not 0 <= time_s - self._last_time < self._least_s  # a clock may be set back
        is_due = self._is_first or is_point or (is_late and step % self._every == 0)
        if is_due:
            self._last_time, self._is_first = time_s, False
        return is_due


class Strided:
    """Passes on the steps that ``StepChoice`` chooses and the last one of an attempt, and all other records."""

    def __init__(self, sink: Sink, every: int, *, least_s: float = 0.5) -> None:
        self._sink = sink
        self._choice = StepChoice(every, least_s=least_s)
        self._skipped: list[kinds.Record] = []  # the newest step, if it was not passed on

    def write(self, *records: kinds.Record) -> None:
        due: list[kinds.Record] = []
        for record in records:
            if isinstance(record, kinds.StepRecord) and not self._choice.is_due(record.step, record.time):
                self._skipped = [record]
                continue
            if isinstance(record, kinds.RunRecord):
                self._choice.begin(record.total_steps)
            elif isinstance(record, kinds.EndRecord):
                due += self._skipped
            if isinstance(record, kinds.StepRecord | kinds.RunRecord | kinds.EndRecord):
                self._skipped = []
            due.append(record)
        if due:
            self._sink.write(*due)

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        skipped, self._skipped = self._skipped, []
        if skipped:
            self._sink.write(*skipped)
        self._sink.close()


class Fanout:
    """Writes every record to several sinks, in their order; if asked, it goes on without those whose disk is full."""

    def __init__(self, sinks: Sequence[Sink], *, goes_on_when_full: bool = False) -> None:
        self._sinks = tuple(sinks)
        self._goes_on_when_full = goes_on_when_full

    def write(self, *records: kinds.Record) -> None:
        for sink in self._sinks:
            self._call(sink.write, *records)

    def flush(self) -> None:
        for sink in self._sinks:
            self._call(sink.flush)

    def close(self) -> None:
        """Closes every sink, even when one of them raises."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(self._call, sink.close)

    def _call(self, action: Callable[..., None], *records: kinds.Record) -> None:
        try:
            action(*records)
        except OSError as error:
            if not (self._goes_on_when_full and is_disk_full(error)):
                raise


def _cut_unterminated_line(path: Path) -> None:
    """Removes the half line that a killed process left, so that the next record does not grow out of it."""
    with path.open("rb+") as file:
        keep, is_found = file.seek(0, 2), False
        while keep > 0 and not is_found:
            start = max(0, keep - 4096)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            keep, is_found = start + newline + 1, newline >= 0
        file.truncate(keep)


def scalars(record: kinds.Record) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a step, an evaluation, communication, experts, a host, or an event of scalars, if any."""
    match record:
        case kinds.StepRecord():
            yield from _of_step(record)
        case kinds.EvalRecord():
            yield from ((f"eval/{name}", value) for name, value in record.scores.items())
            yield "eval/seconds", record.seconds
        case kinds.CommRecord():
            values = {"calls": record.calls, "bytes": record.bytes, "seconds": record.seconds}
            values |= {"bytes_per_s": record.bandwidth, "bus_bytes_per_s": record.bus_bandwidth}
            yield from ((f"comm/{record.group}/{record.kind}/{name}", value) for name, value in values.items())
        case kinds.ExpertsRecord():
            values = {"most": max(record.loads), "least": min(record.loads), "entropy": record.entropy}
            values |= {"auxiliary": record.auxiliary, "dropped": record.dropped / max(1, sum(record.choices))}
            yield from ((f"experts/{record.layer}/{name}", value) for name, value in values.items())
        case kinds.HostRecord():
            yield from ((f"host/{record.host}/{name}", value) for name, value in record.values.items())
        case kinds.EventRecord(name="scalars"):
            yield from ((tag, value) for tag, value in record.detail.items() if isinstance(value, int | float))


def _of_step(record: kinds.StepRecord) -> Iterator[tuple[str, float]]:
    phases = ("step_s", "data_s", "forward_s", "backward_s", "comm_s", "optimizer_s", "host_s")
    scale = record.loss_scale if record.loss_scale != 1.0 else None
    tflops = None if record.flops_per_s is None else record.flops_per_s / 1e12
    values = {"train/loss": record.loss, "train/grad_norm": record.grad_norm, "train/loss_scale": scale}
    values |= {"train/lr": record.lr, "train/epoch": record.epoch}
    values |= {f"time/{name}": getattr(record, name) for name in phases}
    values |= {"speed/samples_per_s": record.samples_per_s, "speed/tflops": tflops, "speed/mfu": record.mfu}
    values |= {"memory/peak_bytes": record.memory_bytes, "memory/allocated_bytes": record.allocated_bytes}
    values["memory/reserved_bytes"] = record.reserved_bytes
    yield from ((name, value) for name, value in values.items() if value is not None)


class LogSink:
    """Hands records to ``logging``: the start and the end of an attempt, steps, evaluations and events."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._global_batch = 0

    def write(self, *records: kinds.Record) -> None:
        for record in records:
            if isinstance(record, kinds.RunRecord):
                self._global_batch = record.global_batch
            if line := describe(record, self._global_batch):
                is_warning = isinstance(record, kinds.EventRecord) and record.name in _WARNINGS
                self._logger.log(logging.WARNING if is_warning else logging.INFO, "%s", line)

    def flush(self) -> None:
        """Does nothing: a line is written when it comes."""

    def close(self) -> None:
        """Does nothing: the logger's handlers are not its own."""


def describe(record: kinds.Record, global_batch: int = 0) -> str:
    """Returns a record in one line; empty for what is many numbers. A rank may have a part of the global batch."""
    match record:
        case kinds.RunRecord():
            size, how = format_count(record.num_parameters), f"{record.strategy}, {record.backend}"
            where = f"rank {record.rank} of {record.world_size} begins on {record.host} ({record.device})"
            return f"{where}: {how}, {size} parameters, {record.total_steps} steps"
        case kinds.StepRecord():
            loss = "no samples" if record.loss is None else f"loss {record.loss:.4f}"
            if record.loss is not None and record.samples < global_batch:
                loss += f" of this rank's {record.samples} of {global_batch} samples"
            rate = f"{record.samples_per_s:,.0f} samples/s"
            return f"step {record.step}: {loss}, lr {record.lr:.3g}, {1e3 * record.step_s:.1f} ms, {rate}"
        case kinds.EvalRecord():
            told = [f"{name} {value:.4f}" for name, value in record.scores.items()]
            return f"evaluation after step {record.step}: {', '.join(told)}"
        case kinds.EventRecord(name="histogram" | "scalars" | "samples"):
            return ""
        case kinds.EventRecord():
            return f"{event_name(record.name)} at step {record.step}: {event_text(record)}"
        case kinds.EndRecord():
            why = f": {record.message}" if record.message else ""
            return f"{record.status} after step {record.step} and {record.seconds:.1f} s{why}"
    return ""
