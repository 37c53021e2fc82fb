"""Which runs there are, and all that is known of one, from files inside the folders that were given alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from paceline.config.suggest import near_folders
from paceline.records import records as kinds
from paceline.records.summary import RankAttempt, RunRecords, worst_end
from paceline.units import format_seconds
from paceline.untrusted import is_number, parse_json_object, read_regular
from paceline.view.columns import Batch, Columns, RecordFile, RewrittenError, record_files

Status = Literal["starting", "running", "done", "failed", "stopped", "died"]

_Kept = TypeVar("_Kept")

QUIET_EVENTS = ("first_step", "histogram", "scalars", "buckets", "settings", "compiled", "clock", "thinned")
_OF_ANY_RANK = ("straggler", "skipped", "experts")
_MOST_KEPT = 20_000  # of events, evaluations and samples each; a run of days has fewer
_MOST_SAMPLES = 4  # evaluations whose samples are shown
_SILENT_S = 30.0
_MARKS = ("config.yaml", "records")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownState:
    """Where a run stands, and what to say about it first."""

    status: Status
    sentence: str
    step: int
    total: int
    seconds: float
    left_s: float | None = None
    attempts: int = 1
    message: str = ""


class ShownRun:
    """One run, as far as it has been read. Not for several threads at once."""

    def __init__(self, folder: Path, name: str = "", known: RunRecords | None = None) -> None:
        self.folder = folder
        self._known: Mapping[Any, Sequence[RankAttempt]] = {} if known is None else known.ranks
        self.name = name or folder.resolve().name
        self.id = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        self.version = 0  # rises with everything new
        self._forget()

    def _forget(self) -> None:
        self.columns = Columns()
        self.starts: dict[int, kinds.RunRecord] = {}  # the last attempt of each rank
        self.attempts = 0
        self.first_time = 0.0
        self.ends: dict[int, kinds.EndRecord] = {}
        self.evaluations: list[kinds.EvalRecord] = []
        self.events: list[tuple[int, kinds.EventRecord]] = []  # with the rank
        self.scalars: list[kinds.EventRecord] = []
        self.samples: list[kinds.EventRecord] = []
        self._shows = sys.maxsize  # the rank whose samples these are
        self.hosts: list[kinds.HostRecord] = []
        self.comm: list[kinds.CommRecord] = []
        self.experts: list[kinds.ExpertsRecord] = []
        self.clocks: dict[int, float] = {}  # by how much the clock of a rank is ahead of rank 0's, where that is known
        self._files: dict[Path, RecordFile] = {}
        self._round: deque[RecordFile] = deque()  # files to look at before all are looked at again
        self._is_cut = True  # ranks that an attempt does not have were cut already

    def look(self, budget_s: float = float("inf")) -> bool:
        """Reads what is new, for about ``budget_s``; returns whether there may be more to read at once."""
        until = time.monotonic() + budget_s
        if not self._round:  # else the one that was broken off goes on: to open hundreds of files anew takes longer
            for file in record_files(self.folder):
                file.known = [each for own in self._known.get(file.rank, ()) for each in (own.run, *own.records)]
                self._files.setdefault(file.path, file)
            self._round.extend(self._files.values())
        while self._round:
            file = self._round[0]
            try:
                while (batch := file.read()) is not None:
                    self._take(file, batch)
                    self.version += 1
                    if time.monotonic() > until:
                        return True
            except RewrittenError:
                self._forget()
                self.version += 1
                return True
            except OSError as error:
                file.num_bad, file.first_bad = 1, error.strerror or str(error)
            self._round.popleft()
        return False

    @property
    def share_read(self) -> float:
        """How much of the known files was read, to a thousandth; 1 is said of all of it alone."""
        files = self._files.values()
        size = sum(each.size for each in files)
        return sum(each.offset for each in files) * 1000 // size / 1000 if size else 1.0

    @property
    def lead(self) -> kinds.RunRecord | None:
        """The last start of the lowest rank."""
        return self.starts[min(self.starts)] if self.starts else None

    @property
    def world_size(self) -> int:
        return 0 if self.lead is None else self.lead.world_size

    def _take(self, file: RecordFile, batch: Batch) -> None:
        start = 0
        for before, record in batch.others:
            if file.rank is None:
                if isinstance(record, kinds.HostRecord):
                    _keep(self.hosts, record)
                continue
            if isinstance(record, kinds.RunRecord):
                self._take_steps(file, batch.rows[start:before])
                start = before
            self._take_record(file.rank, record)
        self._take_steps(file, batch.rows[start:])

    def _take_steps(self, file: RecordFile, rows: list[tuple[Any, ...]]) -> None:
        if not rows or file.rank is None:
            return
        if bad := self.columns.take(file.rank, rows):
            file.num_bad += bad
            file.first_bad = file.first_bad or "a step has a value that is no number"
        if file.rank == min(self.starts, default=0) and not self._is_cut:
            self._is_cut = True
            self.columns.cut(self.world_size, int(rows[0][0]))

    def _take_record(self, rank: int, record: kinds.Record) -> None:
        match record:
            case kinds.RunRecord():
                self.starts[rank] = record
                self.ends.pop(rank, None)
                if rank == min(self.starts):
                    self.attempts += 1
                    self._is_cut = False
                    self.first_time = self.first_time or record.time
                    if self.attempts > 1:
                        detail = {"number": self.attempts}
                        again = kinds.EventRecord(name="attempt", step=0, detail=detail, time=record.time)
                        self.events.append((rank, again))
            case kinds.EndRecord():
                self.ends[rank] = record
            case kinds.EvalRecord() if rank == min(self.starts, default=0):  # every rank writes the same
                _keep(self.evaluations, record)
            case kinds.EventRecord(name="scalars"):
                _keep(self.scalars, record)
            case kinds.EventRecord(name="samples"):
                if rank <= self._shows:  # of the lowest rank that has any: in a pipeline, one of the last stage
                    kept = self.samples[1 - _MOST_SAMPLES :] if rank == self._shows else []
                    self.samples, self._shows = [*kept, record], rank
            case kinds.EventRecord(name="clock"):
                ahead_s, ranks = record.detail.get("ahead_s"), record.detail.get("ranks")
                if is_number(ahead_s) and isinstance(ranks, list):
                    self.clocks |= {each: float(ahead_s) for each in ranks if isinstance(each, int)}
            case kinds.ExpertsRecord():
                _keep(self.experts, record)
            case kinds.EventRecord() if rank == min(self.starts, default=0) or record.name in _OF_ANY_RANK:
                _keep(self.events, (rank, record))
            case kinds.CommRecord() if rank == min(self.starts, default=0):
                _keep(self.comm, record)

    def state(self, now: float | None = None) -> ShownState:
        now = time.time() if now is None else now
        lead = self.lead
        step = int(self.columns.steps[-1]) if len(self.columns.steps) else 0
        if lead is None:
            return ShownState(status="starting", sentence="waiting for the first record", step=0, total=0, seconds=0.0)
        times = self.columns.curves()["time"]
        last = float(times[-1]) if len(times) else lead.time
        end = worst_end(self.ends.get(rank) for rank in sorted(self.starts) if rank < lead.world_size)
        total = lead.total_steps
        common: dict[str, Any] = {"step": step, "total": total, "attempts": self.attempts}
        if end is not None:
            seconds = end.time - self.first_time
            sentence = _ended(end, total, seconds)
            return ShownState(status=end.status, sentence=sentence, seconds=seconds, message=end.message, **common)
        here = socket.gethostname()  # another host's processes cannot be seen
        going = [run for rank, run in self.starts.items() if rank < lead.world_size and rank not in self.ends]
        gone = [run.rank for run in going if run.host == here and not _is_alive(run.pid, run.time)]
        if gone:
            who = f"rank {gone[0]}" if len(gone) == 1 else f"{len(gone)} ranks"
            sentence = f"died after step {step:,}: the process of {who} is gone, and no end was recorded"
            return ShownState(status="died", sentence=sentence, seconds=last - self.first_time, **common)
        lengths = self.columns.curves()["step_s"]
        known = sorted(float(each) for each in lengths[-50:] if each == each)
        left_s = known[len(known) // 2] * (total - step) if known and step < total else None
        sentence = f"running, step {step:,} of {total:,}" if total else f"running, step {step:,}"
        sentence += f", about {format_seconds(left_s)} left" if left_s is not None else ""
        quiet_s = now - max(last, lead.time)
        if quiet_s > max(_SILENT_S, 10 * float(lengths[-1]) if len(lengths) else 0.0):
            sentence += f"; no step for {format_seconds(quiet_s)}"
        return ShownState(status="running", sentence=sentence, seconds=now - self.first_time, left_s=left_s, **common)

    def verdict(self) -> str:
        """Returns the sentence of the judge of hangs, if there is one of this attempt."""
        try:
            path = self.folder / "verdict.json"
            if self.lead is None or path.is_symlink() or path.stat().st_mtime < self.lead.time:
                return ""
            return str(parse_json_object(read_regular(path)).get("sentence", ""))
        except (OSError, ValueError):
            return ""

    def problems(self) -> list[str]:
        """Returns what could not be read, and ranks that left nothing."""
        told = [problem for each in self._files.values() if (problem := each.problem)]
        missing = [rank for rank in range(min(self.world_size, 4096)) if rank not in self.starts]
        if missing and self.starts:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            told.append(f"no records of rank {shown}: the figures are of the other ranks")
        return told


def find_runs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Returns the folders of runs at these paths or inside them, the newest first, and what is wrong with others."""
    runs: dict[Path, Path] = {}
    problems = []
    for path in paths:
        if is_run(path):
            runs.setdefault(path.resolve(), path)
            continue
        if not (inner := list(_runs_in(path))):
            what = "has no run in it" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            fix = near_folders(path) or "a run's folder has records/rank-<r>.jsonl"
            problems.append(f"{path} {what}; {fix}")
        for each in inner:
            runs.setdefault(each.resolve(), each)
    return sorted(runs.values(), key=_started, reverse=True), problems


def read_runs(folders: Sequence[Path], known: Sequence[RunRecords] = ()) -> list[ShownRun]:
    """Reads the records of runs, as far as they are there; what is ``known`` of their ranks is not read again."""
    runs = [ShownRun(*about) for about in zip_longest(folders, names_of(folders), known)]
    for run in runs:
        while run.look():
            pass
    return runs


def is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in _MARKS)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Returns what to call runs: the folder's name, with as much of the path as tells two of one name apart."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for own in parts:
        length = 1
        while length < len(own) and any(each[-length:] == own[-length:] for each in parts if each is not own):
            length += 1
        names.append("/".join(own[-length:]))
    return names


def _runs_in(path: Path) -> Iterator[Path]:
    """Yields the runs that lie directly in a folder; a link that leads out of it is none of them."""
    for inner in path.iterdir() if path.is_dir() else ():
        is_inside = Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(path))
        with contextlib.suppress(PermissionError):
            if not inner.name.startswith(".") and is_inside and inner.is_dir() and is_run(inner):
                yield inner


def _started(folder: Path) -> float:
    for mark in _MARKS:
        with contextlib.suppress(OSError):
            return (folder / mark).stat().st_mtime
    return 0.0


def _keep(kept: list[_Kept], item: _Kept) -> None:
    """Appends an item; of too many, every second goes."""
    kept.append(item)
    if len(kept) > _MOST_KEPT:
        del kept[1::2]


def _is_alive(pid: int, since: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + 1 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.Error:
        return True


def _ended(end: kinds.EndRecord, total: int, seconds: float) -> str:
    took = format_seconds(max(0.0, seconds))
    if end.status == "done":
        return f"done after {end.step:,} steps in {took}"
    why = end.message.partition("\n")[0]
    verb = "failed" if end.status == "failed" else "stopped"
    return f"{verb} at step {end.step:,} of {total:,} after {took}" + (f": {why}" if why else "")
