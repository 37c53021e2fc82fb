"""What others add to a rank's records: the last line, where the rank could not write it, and that somebody is late."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from paceline.health.straggler import Straggler
from paceline.records.records import EndRecord, EndStatus, EventRecord, Record, RunRecord, parse_line, to_line
from paceline.records.sinks import JsonlSink
from paceline.run.progress import read_progress

_RUN = b'{"type":"run"'


def open_attempts(folder: Path, ranks: Iterable[int], *, since: float) -> list[int]:
    """Returns the ranks that began an attempt after ``since`` and wrote no end. One pass over their files."""
    return [rank for rank in ranks if _open_attempt(_path(folder, rank), since) is not None]


def end_records(folder: Path, ranks: Iterable[int], status: EndStatus, message: str, *, since: float) -> None:
    """Writes the end of each attempt that began after ``since`` and has none. One pass over the files of ``ranks``.

    A disk that takes no more is left alone: the failure at hand matters more.
    """
    for rank in ranks:
        attempt = _open_attempt(_path(folder, rank), since)
        if attempt is None:
            continue
        run, step = attempt
        now = time.time()
        end = EndRecord(status=status, step=step, seconds=now - run.time, message=message, time=now)
        with contextlib.suppress(OSError), contextlib.closing(JsonlSink(_path(folder, rank))) as sink:
            sink.write(end)


def note_straggler(folder: Path, rank: int, found: Straggler) -> None:
    """Adds an event to the records of a rank that is still writing them; nothing where it has none yet.

    One write at the end of the file, which is where the rank writes too: lines stay whole. A full disk is left alone.
    """
    progress = read_progress(folder).get(rank)
    step = 0 if progress is None else progress.last_step
    event = EventRecord(name="straggler", step=step, detail=found.to_json(), time=time.time())
    with contextlib.suppress(OSError):
        descriptor = os.open(_path(folder, rank), os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, to_line(event).encode())
        finally:
            os.close(descriptor)


def _path(folder: Path, rank: int) -> Path:
    return folder / "records" / f"rank-{rank}.jsonl"


def _open_attempt(path: Path, since: float) -> tuple[RunRecord, int] | None:
    """Returns the start of the last attempt and the step it came to; None without one, or if its end is written."""
    kept: dict[bytes, bytes] = {}
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.startswith(_RUN):
                    kept.clear()
                if line.endswith(b"\n"):
                    kept[line[: line.index(b",")]] = line  # the last of each type
    found: list[Record] = [parse_line(line) for line in kept.values()]
    run = next((record for record in found if isinstance(record, RunRecord)), None)
    if run is None or run.time < since or any(isinstance(record, EndRecord) for record in found):
        return None
    return run, max((record.step for record in found if not isinstance(record, RunRecord)), default=0)
