"""What a run tells on the terminal of whoever started it: decisions before it, progress during it, and notes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from paceline.records.records import EndRecord, EventRecord, Record, RunRecord, follow_records
from paceline.run.logs import log
from paceline.run.signals import start_thread
from paceline.terminal import echo


def say(text: str) -> None:
    """Tells the user something that is not a result: on standard error, and in the log of the run if there is one."""
    echo(f"paceline: {text}", err=True)
    log(logging.INFO, text)


def tell(level: int, text: str) -> None:
    """Writes a line into the log of the run; warnings are told on standard error too."""
    log(level, text)
    if level >= logging.WARNING:
        echo(f"paceline: {text}", err=True)


@contextlib.contextmanager
def live_progress(folder: Path, *, is_shown: bool) -> Iterator[None]:
    """Shows rank 0's records as they are written, in a thread of its own."""
    if not is_shown:
        yield
        return
    from paceline.records.console import ProgressView

    view, since, is_over = ProgressView(), time.time(), threading.Event()

    def follow() -> None:
        for record in follow_records(folder / "records" / "rank-0.jsonl", is_over.is_set, poll_s=0.1):
            if record.time < since:  # a resumed run's file begins with what an earlier attempt wrote
                continue
            # What went wrong is told once, with its cause; an attempt that failed in its set-up plans no steps.
            is_failure = isinstance(record, EndRecord) and record.status != "done"
            if not is_failure and not (isinstance(record, RunRecord) and record.total_steps == 0):
                view.write(_with_near_paths(record))

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    try:
        start_thread(thread)
        yield
    finally:
        is_over.set()
        thread.join(timeout=5.0)
        view.flush()
        view.close()


def _with_near_paths(record: Record) -> Record:
    """Returns an event with paths below the current folder as seen from there."""
    if not isinstance(record, EventRecord):
        return record
    here = f"{Path.cwd()}{os.sep}"
    detail = {
        key: value.removeprefix(here) if isinstance(value, str) else value for key, value in record.detail.items()
    }
    return replace(record, detail=detail)
