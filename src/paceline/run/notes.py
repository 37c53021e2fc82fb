"""The files through which ranks and launchers tell one another what happened, also after the writer is gone.

    logs/rank-<r>.pid          the rank's process, its host and its launcher
    logs/rank-<r>.step         first step of the attempt, last step trained; little-endian, 8 bytes each
    logs/rank-<r>.error.json   how the rank failed
    logs/preempted             the ranks have saved and left because a signal asked them to
    verdict.json, verdict.txt  why ranks did not go on; also in the log of every rank

Steps are written into a file that is mapped into memory: it costs less than a microsecond, and what was written is
there also after SIGKILL, where records that a rank had not flushed are lost. ``health/diagnosis.py`` judges the notes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from paceline.comm.ledger.file import LedgerReader, ledger_path
from paceline.errors import LaunchError, PacelineError, UsageError
from paceline.health.diagnosis import Diagnosis, Stop, TrainedSteps, diagnose
from paceline.health.exit_codes import PREEMPTED
from paceline.health.failure import Failure, failure_of_verdict, locate_death
from paceline.health.verdict import MISMATCHES, HangVerdict, judge
from paceline.run.logs import append_line
from paceline.untrusted import parse_json_object, read_regular

_STEPS = struct.Struct("<qq")
FAILURES, VERDICTS, PREEMPTION = "logs/rank-*.error.json", "verdict.*", "logs/preempted"
_SMALL_BYTES = 2**16


def forget_attempt(folder: Path, first: int = 0, end: int | None = None) -> None:
    """Removes what ranks of an earlier attempt left, from the rank ``first`` to before ``end``; and the verdict."""
    notes = (FAILURES, "logs/rank-*.pid", "logs/rank-*.step", "health/rank-*.ledger")
    for path in [path for pattern in notes for path in folder.glob(pattern)]:
        if _rank_of(path) in range(first, sys.maxsize if end is None else end):
            path.unlink(missing_ok=True)
    forget(folder, VERDICTS, PREEMPTION, "health/process-*.stack")


def forget(folder: Path, *patterns: str) -> None:
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink(missing_ok=True)


def note_process(folder: Path, rank: int, launcher: int | None = None) -> None:
    """Leaves this rank's process number for the launcher: with the host and the launcher, as folders may be shared."""
    text = f"{os.getpid()} {socket.gethostname()} {launcher or ''}".rstrip()
    (folder / "logs" / f"rank-{rank}.pid").write_text(f"{text}\n", encoding="utf-8")


def noted_processes(folder: Path, launcher: int | None = None) -> dict[int, int]:
    """Returns the process of each rank that noted one on this host, by rank; those of one launcher if it is given."""
    found = {}
    for path in (folder / "logs").glob("rank-*.pid"):
        words: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # another host begins an attempt, and has removed it
            words = path.read_text(encoding="utf-8").split()
        is_here = len(words) < 2 or words[1] == socket.gethostname()
        is_ours = launcher is None or len(words) < 3 or int(words[2]) == launcher
        if words and is_here and is_ours:
            found[_rank_of(path)] = int(words[0])
    return dict(sorted(found.items()))


class StepNote:
    """A rank's note of its own progress."""

    def __init__(self, folder: Path, rank: int, first_step: int) -> None:
        descriptor = os.open(folder / "logs" / f"rank-{rank}.step", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.pwrite(descriptor, _STEPS.pack(first_step, first_step), 0)  # a full disk is found here, not in a mapping
            self._memory = mmap.mmap(descriptor, _STEPS.size)
        finally:
            os.close(descriptor)
        self._first_step = first_step

    def write(self, step: int) -> None:
        _STEPS.pack_into(self._memory, 0, self._first_step, step)


def read_progress(folder: Path) -> dict[int, TrainedSteps]:
    found = {}
    for path in sorted((folder / "logs").glob("rank-*.step")):
        with contextlib.suppress(FileNotFoundError):  # a new attempt has begun, and has removed the notes of the last
            content = path.read_bytes()
            if len(content) == _STEPS.size:
                first, last = _STEPS.unpack(content)
                found[_rank_of(path)] = TrainedSteps(first_step=first, last_step=last)
    return found


def has_trained(folder: Path) -> bool:
    """Says whether any rank has trained a step since the attempt began."""
    return any(each.last_step > each.first_step for each in read_progress(folder).values())


def write_failure(folder: Path, failure: Failure) -> None:
    """Leaves a rank's failure where the launcher finds it, whole or not at all."""
    path = folder / "logs" / f"rank-{failure.rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace_file(path, json.dumps(asdict(failure), indent=2) + "\n")


def read_failures(folder: Path) -> list[Failure]:
    return [Failure(**parse_json_object(read_regular(path))) for path in sorted(folder.glob(FAILURES))]


def note_preemption(folder: Path) -> None:
    (folder / PREEMPTION).touch()


def was_preempted(folder: Path) -> bool:
    """Says whether ranks noted a preemption since the attempt began."""
    return (folder / PREEMPTION).is_file()


def _replace_file(path: Path, text: str) -> None:
    partial = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _rank_of(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("rank-"))


# Verdicts.


def end_ranks(folder: Path, verdict: HangVerdict, processes: Mapping[int, int]) -> None:
    """Makes a verdict the failure of ranks, and kills them; stopped first, none fails in its own words."""
    groups = set(processes.values()) - {os.getpid(), os.getpgrp()}
    _signal(groups, signal.SIGSTOP)
    _fail(folder, verdict, processes)
    _signal(groups, signal.SIGKILL)


def tell_verdict(folder: Path, verdict: HangVerdict, ranks: Iterable[int]) -> None:
    """Writes a verdict into the run's folder, its log, and the log of every rank; a disk that is full is left alone."""
    told = {**verdict.to_json(), "time": time.time(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):
        _replace_file(folder / "verdict.txt", verdict.to_text())
        _replace_file(folder / "verdict.json", json.dumps(told, indent=2) + "\n")
    for name in ("run", *(f"rank-{rank}" for rank in ranks)):
        append_line(folder / "logs" / f"{name}.log", "watch", logging.ERROR, verdict.to_text().rstrip())


def note_mismatch(folder: Path, ranks: Iterable[int]) -> None:
    """Compares the ledgers of ranks that failed: if they had called different operations, that is the cause."""
    if any(failure.kind == "hang" for failure in read_failures(folder)):
        return  # it is told already
    readers = [LedgerReader.open(ledger_path(folder, rank)) for rank in ranks]
    now = time.monotonic()
    views = [reader.view(changed_s=now) for reader in readers if reader is not None]
    verdict = judge(views, now, MISMATCHES)
    if verdict is not None:
        found = [view.rank for view in views]
        tell_verdict(folder, verdict, found)
        _fail(folder, verdict, found)


def _fail(folder: Path, verdict: HangVerdict, ranks: Iterable[int]) -> None:
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
            (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)


# The errors with which a run ends, each with the exit code of the command.


class RunFailedError(LaunchError):
    """A run that ended because a rank failed. ``end`` says why it is not started again, where that was decided."""

    def __init__(self, diagnosis: Diagnosis, end: Stop | None = None) -> None:
        reason = "" if end is None or not end.reason else f"\n  {end.reason}"
        self.diagnosis = diagnosis
        self.code = diagnosis.code if end is None else end.exit_code(diagnosis.code)
        super().__init__(f"{diagnosis.message}{reason}")


class RunPreemptedError(LaunchError):
    """A run that was asked to make room, and has saved its state, or had trained no step that could be lost."""

    code = PREEMPTED

    def __init__(self, *, is_saved: bool = True) -> None:
        super().__init__(f"preempted: {'the state is saved' if is_saved else 'no step was trained yet'}")


class RunStoppedError(LaunchError):
    """A run that a signal ended, such as Ctrl-C's SIGINT."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"ended by {name}{' (Ctrl-C)' if name == 'SIGINT' else ''}; no rank is left")


def explain_failures(failures: list[Failure], folder: Path) -> PacelineError:
    """Makes the one error that the user sees: UsageError for what was refused, RunFailedError for what went wrong."""
    if not failures:
        return LaunchError(f"the ranks ended without a result or an error\n  their logs are in {folder / 'logs'}")
    is_silent = any(failure.cause == "died" for failure in failures)
    is_full = is_silent and shutil.disk_usage(folder).free < _SMALL_BYTES
    diagnosis = diagnose(failures, folder, is_disk_full=is_full)
    return UsageError(diagnosis.message) if diagnosis.cause.is_refusal else RunFailedError(diagnosis)
