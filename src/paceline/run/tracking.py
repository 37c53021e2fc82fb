"""Follows the records of a run and hands them to trackers, so that none can stop or slow a rank.

The launcher does this, in one thread a tracker; under another launcher the first rank does. The files of records are
the queue: a tracker that is slow reads them later, and one that fails leaves them as they are. At the end of a run
trackers get ten seconds to catch up; what was not sent by then is told in the run's log.

Trackers take the records of rank 0 and of hosts. Of steps they get the first and the last, 200 evenly spaced ones, and
those of ``monitor.log_every``, two a second at most.
TensorBoard has all ranks: rank 0 in ``tensorboard/``, each other rank and host in a folder of its own below.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.records.records import (
    EndRecord,
    EventRecord,
    HostRecord,
    Record,
    RunRecord,
    StepRecord,
    complete_lines,
    parse_line,
)
from paceline.records.sinks import Sink, StepChoice, TensorBoardSink, scalars
from paceline.records.trackers import TrackedRun, open_tracker

if TYPE_CHECKING:
    from paceline.config import Config

_LOOK_S = 0.5
_POINTS = 200  # of a run, however short it is
_END_S = 10.0
_MOST_FAILURES = 3  # in a row
_STEP = re.compile(rb'\{"type":"step","schema":\d+,"step":(\d+),.*?"time":([\d.e+]+)')


class TensorBoard:
    """Curves of all ranks and hosts, each in a folder that TensorBoard shows as a run of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sinks: dict[str, TensorBoardSink] = {}
        self._step = 0
        self.take("rank-0", ())  # fails here where the library is missing

    def take(self, source: str, records: Sequence[Record]) -> None:
        sink = self._sinks.get(source)
        if sink is None:
            folder = self._folder if source == "rank-0" else self._folder / source
            sink = self._sinks[source] = TensorBoardSink(folder)
        if source == "rank-0":
            self._step = max((each.step for each in records if isinstance(each, StepRecord)), default=self._step)
        sink.write(*(self._with_step(each) if isinstance(each, HostRecord) else each for each in records))

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()

    def _with_step(self, record: HostRecord) -> EventRecord:
        """Returns a host's values as those of the step that rank 0 has come to."""
        values = dict(scalars(record))
        prefix = f"host/{record.host}/"  # the folder has the name
        detail = {f"host/{name.removeprefix(prefix)}": value for name, value in values.items()}
        return EventRecord(name="scalars", step=self._step, detail=detail, time=record.time)


class FirstRank:
    """Passes the records of rank 0 and of hosts on to one sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.close = sink.close

    def take(self, source: str, records: Sequence[Record]) -> None:
        if source == "rank-0" or source.startswith("host-"):
            self._sink.write(*records)


class _Source:
    """A file of records that is read as it grows; of steps, those that are due."""

    def __init__(self, path: Path, *, every: int, offset: int) -> None:
        self.path = path
        self._offset = offset
        self._choice = StepChoice(every, points=_POINTS)
        self._skipped = b""  # the newest step, if it was not due

    def read(self, *, is_last: bool) -> list[Record]:
        """Returns the records that have come since the last call; a line that is none is left out."""
        found: list[Record] = []
        for line, end in complete_lines(self.path, self._offset):
            self._offset = end
            with contextlib.suppress(ValueError):
                found += self._take(line)
        return found + (self._newest_step() if is_last else [])

    def _take(self, line: bytes) -> list[Record]:
        """Looks at step and time alone of a step: a small model makes thousands of them a second."""
        step = _STEP.match(line)
        if step is not None and not self._choice.is_due(int(step[1]), float(step[2])):
            self._skipped = line
            return []
        record = parse_line(line)
        before = self._newest_step() if isinstance(record, EndRecord) else []
        if isinstance(record, StepRecord | RunRecord):
            self._skipped = b""
        if isinstance(record, RunRecord):
            self._choice.begin(record.total_steps)
        return [*before, record]

    def _newest_step(self) -> list[Record]:
        line, self._skipped = self._skipped, b""
        return [parse_line(line)] if line else []

    def unread_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return self.path.stat().st_size - self._offset
        return 0


class _Follower:
    """Feeds one tracker, in a thread, from the files that are in the folder and those that come."""

    def __init__(self, name: str, run: TrackedRun, config: Config, known: dict[Path, int]) -> None:
        self.name = name
        self._run = run
        self._config = config
        self._known = known
        self._sources: dict[Path, _Source] = {}
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._follow, name=f"tracker-{name}", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Asks for a last look; whoever joins the thread waits for it."""
        self._is_over.set()

    def unread_bytes(self) -> int:
        return sum(source.unread_bytes() for source in list(self._sources.values()))

    def _follow(self) -> None:
        tracker: TensorBoard | FirstRank | None = None
        failures = num_lost = 0
        while failures < _MOST_FAILURES:
            is_last = self._is_over.wait(_LOOK_S)
            for path, source in self._find().items():
                records: list[Record] = []
                if tracker is None and path.stem != "rank-0":
                    continue
                try:
                    records = source.read(is_last=is_last)
                    if records and tracker is None:  # a run that is refused has no record, and nobody tracks it
                        tracker = self._open()
                        if tracker is None:
                            return
                    if records and tracker is not None:
                        tracker.take(path.stem, records)
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

    def _open(self) -> TensorBoard | FirstRank | None:
        """Opens the tracker; where that fails, tells so and returns None: the run goes on without."""
        try:
            if self.name == "tensorboard":
                return TensorBoard(self._run.folder / "tensorboard")
            return FirstRank(open_tracker(self.name, self._run))
        except Exception as error:  # a library, a login, a network
            self._warn(f"does not track this run: {_first_line(error)}")
            return None

    def _warn(self, text: str) -> None:
        self._run.tell(logging.WARNING, f"{self.name} {text}")

    def _find(self) -> dict[Path, _Source]:
        paths = sorted((self._run.folder / "records").glob("*.jsonl"), key=lambda path: path.stem != "rank-0")
        for path in paths:
            if path not in self._sources:
                every = self._config.monitor.log_every
                self._sources[path] = _Source(path, every=every, offset=self._known.get(path, 0))
        return self._sources


@contextlib.contextmanager
def tracking(folder: Path, config: Config, tell: Callable[[int, str], None]) -> Iterator[None]:
    """Feeds the trackers of a config while the block runs with what is recorded in it, and a while longer."""
    names = dict.fromkeys((*(["tensorboard"] if config.monitor.tensorboard else []), *config.monitor.trackers))
    if not names:
        yield
        return
    known = {path: path.stat().st_size for path in (folder / "records").glob("*.jsonl")}  # tracked already
    run = TrackedRun(folder=folder.absolute(), config=config.model_dump(mode="json"), tell=tell)
    absolute = {path.absolute(): size for path, size in known.items()}
    followers = [_Follower(name, run, config, absolute) for name in names]
    try:
        yield
    finally:
        for follower in followers:
            follower.end()
        deadline = time.monotonic() + _END_S
        for follower in followers:
            follower.thread.join(timeout=max(0.0, deadline - time.monotonic()))
            if follower.thread.is_alive():
                left = f"{follower.unread_bytes():,} bytes of records were not sent"
                tell(logging.WARNING, f"{follower.name} did not end within {_END_S:.0f} s: {left}")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, PacelineError) and text:  # its words are for people
        return text[0]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
