"""What goes on beside the ranks of a run in the process that started them: its log, progress, samples and trackers.

Trackers follow the files of records, in one thread each, so that none can stop or slow a rank; at the end of a run they
get ten seconds to catch up. They take the records of rank 0 and of hosts; of steps the first and the last, 200 evenly
spaced ones, and those of ``monitor.log_every``, two a second at most. TensorBoard has the first 16 ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.config.sections import MonitorConfig
from paceline.errors import PacelineError
from paceline.records import records as kinds
from paceline.records.host import HostSampler, open_gpus
from paceline.records.sinks import JsonlSink, Sink, StepChoice, TensorBoardSink, scalars
from paceline.records.thin import lines_kept
from paceline.records.trackers import TrackedRun, open_tracker
from paceline.run.logs import log, run_log, tell
from paceline.run.notes import noted_processes
from paceline.run.signals import beside, polling

if TYPE_CHECKING:
    from paceline.comm.base import Communicator

_PATIENCE_S = 2.0
_LOOK_S = 0.5
_POINTS = 200  # of a run, however short it is
_END_S = 10.0
_TENSORBOARD_RANKS = 16
_MOST_FAILURES = 3  # in a row
_STEP = re.compile(rb'\{"type":"step","schema":\d+,"step":(\d+),.*?"time":([\d.e+]+)')


@contextlib.contextmanager
def observing(folder: Path, config: Config, *, is_quiet: bool = False, is_verbose: bool = False) -> Iterator[None]:
    """Observes a run that this process started: writes its log, shows progress, samples the host, feeds trackers."""
    is_shown = config.monitor.console and not is_quiet
    shows_log = is_shown and is_verbose
    with (
        run_log(folder, is_shown=shows_log),
        live_progress(folder, is_shown=is_shown and not is_verbose),  # its lines are in the log
        tracking(folder, config.monitor, config.model_dump(mode="json"), log if shows_log else tell),
        observing_host(folder, config),
    ):
        yield


@contextlib.contextmanager
def observing_from_a_rank(
    folder: Path,
    monitor: MonitorConfig,
    settings: dict[str, Any],
    comm: Communicator,
    processes: Callable[[], Mapping[int, int]] | None,
) -> Iterator[None]:
    """Observes a run of another launcher: rank 0 feeds trackers, one rank a host, given ``processes``, samples it."""
    with contextlib.ExitStack() as stack:
        if comm.rank == 0:
            stack.enter_context(tracking(folder, monitor, settings, log))
        if processes is not None:
            most = lines_kept(monitor.keep_steps, comm.size)
            stack.enter_context(sampling(folder, monitor.sample_s, processes, log, most))
        yield


def observing_host(folder: Path, config: Config) -> contextlib.AbstractContextManager[None]:
    most = lines_kept(config.monitor.keep_steps, config.parallel.ranks)
    return sampling(folder, config.monitor.sample_s, lambda: noted_processes(folder, os.getpid()), log, most)


@contextlib.contextmanager
def live_progress(folder: Path, *, is_shown: bool) -> Iterator[None]:
    """Shows rank 0's records as they are written, in a thread of its own."""
    if not is_shown:
        yield
        return
    from paceline.records.console import ProgressView

    view, since, is_over, here = ProgressView(), time.time(), threading.Event(), f"{Path.cwd()}{os.sep}"

    def follow() -> None:
        for record in kinds.follow_records(folder / "records" / "rank-0.jsonl", is_over.is_set, poll_s=0.1):
            if record.time < since:  # a resumed run's file begins with what an earlier attempt wrote
                continue
            if isinstance(record, kinds.EventRecord):  # paths below the current folder are shown as seen from there
                near = {k: v.removeprefix(here) if isinstance(v, str) else v for k, v in record.detail.items()}
                record = replace(record, detail=near)
            # What went wrong is told once, with its cause; an attempt that failed in its set-up plans no steps.
            is_failure = isinstance(record, kinds.EndRecord) and record.status != "done"
            if not is_failure and not (isinstance(record, kinds.RunRecord) and record.total_steps == 0):
                view.write(record)

    try:
        with beside(threading.Thread(target=follow, name="progress", daemon=True), is_over, 5.0):
            yield
    finally:
        view.flush()
        view.close()


@contextlib.contextmanager
def sampling(
    folder: Path,
    every_s: float | None,
    processes: Callable[[], Mapping[int, int]],
    tell: Callable[[int, str], None],
    most: int | None = None,
) -> Iterator[None]:
    """Samples this host into ``records/host-NAME.jsonl`` while the block runs, and once more at its end; None: never.

    ``processes`` returns those of the ranks here. A sampler that fails tells so, and ends. About ``most`` lines stay.
    """
    if every_s is None:
        yield
        return
    name = re.sub(r"[^\w.-]", "_", socket.gethostname())
    path = folder / "records" / f"host-{name}.jsonl"
    gpus, why = open_gpus()
    if gpus is None:
        tell(logging.INFO, f"no measurements of GPUs on this host: {why}")
    sampler, stack = HostSampler(processes, gpus), contextlib.ExitStack()
    sinks: list[JsonlSink] = []  # opened with the first sample: a run that is refused leaves nothing

    def look() -> bool:
        try:
            if not sinks:
                sinks.append(stack.enter_context(contextlib.closing(JsonlSink(path, waits_for_space=True, most=most))))
            sinks[0].write(sampler.look())
        except Exception as error:  # whatever a driver or a disk does
            tell(logging.WARNING, f"this host is not sampled any more: {type(error).__name__}: {error}")
            return True
        return False

    with stack:
        if gpus is not None:
            stack.callback(gpus.close)
        with polling(look, every_s=every_s, name="host", patience_s=_PATIENCE_S):
            yield
        look()


class TensorBoard:
    """Curves of all ranks and hosts, each in a folder that TensorBoard shows as a run of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._step = folder, 0
        self._sinks: dict[str, TensorBoardSink] = {}
        self.take("rank-0", ())  # fails here where the library is missing

    def take(self, source: str, records: Sequence[kinds.Record]) -> None:
        sink = self._sinks.get(source)
        if sink is None:
            folder = self._folder if source == "rank-0" else self._folder / source
            sink = self._sinks[source] = TensorBoardSink(folder)
        if source == "rank-0":
            self._step = max((each.step for each in records if isinstance(each, kinds.StepRecord)), default=self._step)
        sink.write(*(self._with_step(each) if isinstance(each, kinds.HostRecord) else each for each in records))

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()

    def _with_step(self, record: kinds.HostRecord) -> kinds.EventRecord:
        """Returns a host's values as those of the step that rank 0 has come to."""
        prefix = f"host/{record.host}/"  # the folder has the name
        detail = {f"host/{name.removeprefix(prefix)}": value for name, value in dict(scalars(record)).items()}
        return kinds.EventRecord(name="scalars", step=self._step, detail=detail, time=record.time)


class _Source:
    """A file of records that is read as it grows; of steps, those that are due."""

    def __init__(self, path: Path, *, every: int, offset: int) -> None:
        self._file = kinds.GrowingFile(path, offset)
        self._choice = StepChoice(every, points=_POINTS)
        self._skipped = b""  # the newest step, if it was not due

    def read(self, *, is_last: bool) -> list[kinds.Record]:
        """Returns the records that have come since the last call; a line that is none is left out."""
        found: list[kinds.Record] = []
        for line in self._file.lines():
            with contextlib.suppress(ValueError):
                found += self._take(line)
        return found + (self._newest_step() if is_last else [])

    def _take(self, line: bytes) -> list[kinds.Record]:
        """Looks at step and time alone of a step: a small model makes thousands of them a second."""
        step = _STEP.match(line)
        if step is not None and not self._choice.is_due(int(step[1]), float(step[2])):
            self._skipped = line
            return []
        record = kinds.parse_line(line)
        before = self._newest_step() if isinstance(record, kinds.EndRecord) else []
        if isinstance(record, kinds.StepRecord | kinds.RunRecord):
            self._skipped = b""
        if isinstance(record, kinds.RunRecord):
            self._choice.begin(record.total_steps)
        return [*before, record]

    def _newest_step(self) -> list[kinds.Record]:
        line, self._skipped = self._skipped, b""
        return [kinds.parse_line(line)] if line else []

    def unread_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return self._file.path.stat().st_size - self._file.offset
        return 0


class _Follower:
    """Feeds one tracker, in a thread, from the files that are in the folder and those that come."""

    def __init__(self, name: str, run: TrackedRun, every: int, known: dict[Path, int]) -> None:
        self.name, self._run, self._every, self._known = name, run, every, known
        self.sources: dict[Path, _Source] = {}
        self.is_over = threading.Event()  # after one more look
        self.thread = threading.Thread(target=self._follow, name=f"tracker-{name}", daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        tracker: TensorBoard | Sink | None = None
        failures = num_lost = 0
        while failures < _MOST_FAILURES:
            is_last = self.is_over.wait(_LOOK_S)
            self._find()
            for path, source in self.sources.items():
                records: list[kinds.Record] = []
                if tracker is None and path.stem != "rank-0":
                    continue
                try:
                    records = source.read(is_last=is_last)
                    if not records:
                        continue
                    tracker = tracker or self._open()  # a run that is refused has no record, and nobody tracks it
                    if tracker is None:
                        return
                    if isinstance(tracker, TensorBoard):
                        tracker.take(path.stem, records)
                    else:
                        tracker.write(*records)
                    failures = 0
                except Exception as error:
                    failures += 1
                    num_lost += len(records)
                    if failures == 1:
                        self._warn(f"fails: {_first_line(error)}")
            if is_last:
                break
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:
                self._warn(f"fails at its end: {_first_line(error)}")
        if failures >= _MOST_FAILURES:
            self._warn(f"failed {failures} times in a row: it tracks this run no more")
        if num_lost:
            self._warn(f"did not get {num_lost} records; they are in the run's folder")

    def _open(self) -> TensorBoard | Sink | None:
        """Opens the tracker; where that fails, tells so and returns None: the run goes on without."""
        try:
            if self.name == "tensorboard":
                return TensorBoard(self._run.folder / "tensorboard")
            return open_tracker(self.name, self._run)
        except Exception as error:  # a library, a login, a network
            self._warn(f"does not track this run: {_first_line(error)}")
            return None

    def _warn(self, text: str) -> None:
        self._run.tell(logging.WARNING, f"{self.name} {text}")

    def _find(self) -> None:
        paths = sorted((self._run.folder / "records").glob("*.jsonl"), key=lambda path: path.stem != "rank-0")
        for path in paths:
            source, _, rank = path.stem.partition("-")
            most = _TENSORBOARD_RANKS if self.name == "tensorboard" else 1
            is_wanted = source == "host" or (rank.isdecimal() and int(rank) < most)
            if is_wanted and path not in self.sources:
                self.sources[path] = _Source(path, every=self._every, offset=self._known.get(path, 0))


@contextlib.contextmanager
def tracking(
    folder: Path, monitor: MonitorConfig, settings: dict[str, Any], tell: Callable[[int, str], None]
) -> Iterator[None]:
    """Feeds trackers while the block runs with what is recorded in it, and a while longer; they show ``settings``."""
    names = dict.fromkeys((*(["tensorboard"] if monitor.tensorboard else []), *monitor.trackers))
    if not names:
        yield
        return
    run = TrackedRun(folder=folder.absolute(), config=settings, tell=tell)
    known = {path: path.stat().st_size for path in (run.folder / "records").glob("*.jsonl")}  # tracked already
    followers = [_Follower(name, run, monitor.log_every, known) for name in names]
    try:
        yield
    finally:
        for follower in followers:
            follower.is_over.set()
        deadline = time.monotonic() + _END_S
        for follower in followers:
            follower.thread.join(timeout=max(0.0, deadline - time.monotonic()))
            if follower.thread.is_alive():
                left = sum(source.unread_bytes() for source in list(follower.sources.values()))
                why = f"did not end within {_END_S:.0f} s: {left:,} bytes of records were not sent"
                tell(logging.WARNING, f"{follower.name} {why}")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, PacelineError) and text:  # its words are for people
        return text[0]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
