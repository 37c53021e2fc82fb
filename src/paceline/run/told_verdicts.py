"""A verdict on ranks, in the files where it is looked for, and what follows from it for them.

It goes to ``verdict.json`` and ``verdict.txt`` of the run's folder, to the log of every rank, and to the failures that
the launcher tells.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from paceline.comm.ledger.file import LedgerReader, ledger_path
from paceline.health.failure import Failure, failure_of_verdict, locate_death
from paceline.health.verdict import HangLimits, HangVerdict, judge
from paceline.run.logs import append_line
from paceline.run.notes import read_failures, replace_file, write_failure


def end_ranks(folder: Path, verdict: HangVerdict, processes: Mapping[int, int]) -> None:
    """Makes a verdict the failure of ranks, and kills them.

    They are stopped first: none is to fail in its own words because another one is gone.
    """
    own = {os.getpid(), os.getpgrp()}
    groups = {pid for pid in processes.values() if pid not in own}
    _signal(groups, signal.SIGSTOP)
    _fail(folder, verdict, processes)
    _signal(groups, signal.SIGKILL)


def tell_verdict(folder: Path, verdict: HangVerdict, ranks: Iterable[int]) -> None:
    """Writes a verdict into the run's folder, its log, and the log of every rank; a disk that is full is left alone."""
    told = {**verdict.to_json(), "time": time.time(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):
        replace_file(folder / "verdict.txt", verdict.to_text())
        replace_file(folder / "verdict.json", json.dumps(told, indent=2) + "\n")
    for name in ("run", *(f"rank-{rank}" for rank in ranks)):
        append_line(folder / "logs" / f"{name}.log", "watch", logging.ERROR, verdict.to_text().rstrip())


def note_mismatch(folder: Path, ranks: Iterable[int]) -> HangVerdict | None:
    """Compares the ledgers of ranks that failed: if they had called different operations, that is the cause."""
    if any(failure.kind == "hang" for failure in read_failures(folder)):
        return None  # it is told already
    readers = {rank: LedgerReader.open(ledger_path(folder, rank)) for rank in ranks}
    now = time.monotonic()
    views = [reader.view(changed_s=now) for reader in readers.values() if reader is not None]
    verdict = judge(views, now, HangLimits(step_s=math.inf, setup_s=math.inf))  # however long they stood
    if verdict is not None:
        ranks = [view.rank for view in views]
        tell_verdict(folder, verdict, ranks)
        _fail(folder, verdict, ranks)
    return verdict


def _fail(folder: Path, verdict: HangVerdict, ranks: Collection[int]) -> None:
    """Makes a verdict the failure of each rank."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # the ranks must be ended all the same
            write_failure(folder, failure_of_verdict(verdict, rank, folder / "verdict.txt"))


def locate_deaths(folder: Path, failures: Iterable[Failure]) -> list[Failure]:
    """Adds to the failures of ranks that were killed or left without a word where they were, as their ledgers say."""
    found = []
    for failure in failures:
        reader = LedgerReader.open(ledger_path(folder, failure.rank)) if failure.cause in ("killed", "died") else None
        if reader is not None:
            failure, verdict = locate_death(failure, reader.view(last=1))
            tell_verdict(folder, verdict, ())
        found.append(failure)
    return found


def _signal(leaders: Iterable[int], number: int) -> None:
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
