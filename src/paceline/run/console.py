"""What a run tells on the terminal of whoever started it: decisions before it, progress during it, and notes."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.records.records import EndRecord, EventRecord, Record, RunRecord, follow_records

if TYPE_CHECKING:
    from paceline.records.console import ProgressView


def say(text: str) -> None:
    """Tells the user something that is not a result: on standard error."""
    typer.echo(f"paceline: {text}", err=True)


class LiveProgress:
    """Shows rank 0's records as they are written, in a thread of its own."""

    def __init__(self, folder: Path, *, is_shown: bool) -> None:
        self._path = folder / "records" / "rank-0.jsonl"
        self._is_shown = is_shown
        self._is_over = threading.Event()
        self._since = time.time()
        self._thread: threading.Thread | None = None
        self._view: ProgressView | None = None

    def __enter__(self) -> None:
        if not self._is_shown:
            return
        from paceline.records.console import ProgressView

        self._view = ProgressView()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None and self._view is not None:
            self._thread.join(timeout=5.0)
            self._view.flush()
            self._view.close()

    def _follow(self) -> None:
        assert self._view is not None
        for record in follow_records(self._path, self._is_over.is_set, poll_s=0.1):
            if record.time < self._since:  # a resumed run's file begins with what an earlier attempt wrote
                continue
            # What went wrong is told once, with its cause; an attempt that failed in its set-up plans no steps.
            is_failure = isinstance(record, EndRecord) and record.status != "done"
            if not is_failure and not (isinstance(record, RunRecord) and record.total_steps == 0):
                self._view.write(_with_near_paths(record))


def _with_near_paths(record: Record) -> Record:
    """Returns an event with paths below the current folder as seen from there."""
    if not isinstance(record, EventRecord):
        return record
    here = f"{Path.cwd()}{os.sep}"
    detail = {
        key: value.removeprefix(here) if isinstance(value, str) else value for key, value in record.detail.items()
    }
    return replace(record, detail=detail)
