"""Follows a launched run: prints its log as it grows and what the target says of it, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.health.exit_codes import FAILED
from paceline.launch.job import JobState, LaunchJob
from paceline.launch.target import Target

_LOOK_S = 0.2
_ASK_S = 1.0  # the target: Slurm's controller is shared by all users
_READ_BYTES = 2**20


def follow(
    target: Target,
    job: LaunchJob,
    write: Callable[[str], None],
    tell: Callable[[str], None],
    *,
    from_start: bool = True,
) -> int:
    """Returns the run's exit code when it has ended. ``write`` gets the log, ``tell`` changes of the job's state."""
    log = _Log(job.log, at=0 if from_start else _size(job.log))
    known, next_ask, state = "", 0.0, JobState(kind="waiting", words="")
    while True:
        if time.monotonic() >= next_ask:
            state = target.state(job)
            next_ask = time.monotonic() + _ASK_S
            if state.words != known and state.kind != "ended":
                tell(f"{job.name}: {state.words}")
            known = state.words
        # A run that is queued again leaves no code: what is there is of its end.
        code = None if job.tasks else job.exit_code()
        for text in log.news():
            write(text)
        if code is not None or state.kind == "ended":
            code = code if code is not None else state.code if state.code is not None else FAILED
            if job.exit_code() is None:
                tell(f"{job.name}: {state.words}")
            return code
        time.sleep(_LOOK_S)


class _Log:
    """The lines of a log that are whole, as they come."""

    def __init__(self, path: Path, at: int) -> None:
        self._path, self._at = path, at

    def news(self) -> list[str]:
        found = []
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                while block := file.read(_READ_BYTES):
                    self._at += len(block)
                    found.append(block.decode("utf-8", "replace"))
        except FileNotFoundError:
            pass
        return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
