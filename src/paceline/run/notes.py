"""The files through which ranks and launchers tell one another what happened, also after the writer is gone.

    logs/rank-<r>.pid          the rank's process, its host and its launcher
    logs/rank-<r>.step         first step of the attempt, last step trained; little-endian, 8 bytes each
    logs/rank-<r>.error.json   how the rank failed
    logs/preempted             the ranks have saved and left because a signal asked them to

Steps are written into a file that is mapped into memory: it costs less than a microsecond, and what was written is
there also after SIGKILL, where records that a rank had not flushed are lost. What the notes mean is judged by
``health/diagnosis.py``.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
from dataclasses import asdict
from pathlib import Path

from paceline.health.diagnosis import TrainedSteps
from paceline.health.failure import Failure
from paceline.untrusted import parse_json_object, read_regular

_STEPS = struct.Struct("<qq")


FAILURES, VERDICTS = "logs/rank-*.error.json", "verdict.*"


def forget_attempt(folder: Path, first: int = 0, end: int | None = None) -> None:
    """Removes what ranks of an earlier attempt left, from the rank ``first`` to before ``end``; and the verdict."""
    notes = (FAILURES, "logs/rank-*.pid", "logs/rank-*.step", "health/rank-*.ledger")
    for path in [path for pattern in notes for path in folder.glob(pattern)]:
        if _rank_of(path) in range(first, sys.maxsize if end is None else end):
            path.unlink(missing_ok=True)
    forget(folder, VERDICTS, "health/process-*.stack")


def forget(folder: Path, *patterns: str) -> None:
    """Removes the notes of some kinds, such as ``FAILURES``."""
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink(missing_ok=True)


# Processes


def note_process(folder: Path, rank: int, launcher: int | None = None) -> None:
    """Leaves this rank's process number for the launcher: with the host and the launcher, as folders may be shared."""
    text = f"{os.getpid()} {socket.gethostname()} {launcher or ''}".rstrip()
    (folder / "logs" / f"rank-{rank}.pid").write_text(f"{text}\n", encoding="utf-8")


def noted_processes(folder: Path, launcher: int | None = None) -> dict[int, int]:
    """Returns the process of each rank that noted one on this host, by rank; those of one launcher if it is given."""
    found = {}
    for path in (folder / "logs").glob("rank-*.pid"):
        words = path.read_text(encoding="utf-8").split()
        is_here = len(words) < 2 or words[1] == socket.gethostname()
        is_ours = launcher is None or len(words) < 3 or int(words[2]) == launcher
        if words and is_here and is_ours:
            found[_rank_of(path)] = int(words[0])
    return dict(sorted(found.items()))


def forget_processes(folder: Path, launcher: int) -> None:
    """Removes the notes of one launcher's ranks: the system uses process numbers again."""
    forget(folder, *(f"logs/rank-{rank}.pid" for rank in noted_processes(folder, launcher)))


# Steps


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
    """Returns the progress of each rank that noted any, by rank."""
    found = {}
    for path in sorted((folder / "logs").glob("rank-*.step")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # a new attempt has begun, and has removed the notes of the last one
            continue
        if len(content) == _STEPS.size:
            first, last = _STEPS.unpack(content)
            found[_rank_of(path)] = TrainedSteps(first_step=first, last_step=last)
    return found


def has_trained(folder: Path, *, since: float) -> bool:
    """Says whether any rank that began after the time ``since`` has trained a step."""
    notes = [
        folder / "logs" / f"rank-{rank}.step"
        for rank, each in read_progress(folder).items()
        if each.last_step > each.first_step
    ]
    return any(note.stat().st_mtime >= since for note in notes)


# Failures


def write_failure(folder: Path, failure: Failure) -> None:
    """Leaves a rank's failure where the launcher finds it, whole or not at all."""
    path = folder / "logs" / f"rank-{failure.rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(failure), indent=2) + "\n")


def read_failures(folder: Path) -> list[Failure]:
    paths = sorted(folder.glob(FAILURES))
    return [Failure(**parse_json_object(read_regular(path))) for path in paths]


# Preemption


def note_preemption(folder: Path) -> None:
    """Notes that the ranks have saved and left because they were asked to."""
    (folder / "logs" / "preempted").touch()


def was_preempted(folder: Path, *, since: float) -> bool:
    """Says whether ranks noted a preemption after the time ``since``."""
    note = folder / "logs" / "preempted"
    return note.is_file() and note.stat().st_mtime >= since


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _rank_of(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("rank-"))
