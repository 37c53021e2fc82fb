"""Why a run failed, in one message: the cause, not its consequences.

A rank that raises leaves ``logs/rank-<r>.error.json``. When one rank fails the others lose their connection and fail
too, so the cause is the first error that is not a lost connection; then a rank that was killed; then the first of all.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CommunicationError, LaunchError, PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    message: str
    traceback: str
    time: float
    is_ours: bool
    is_consequence: bool


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Leaves a rank's error where the launcher finds it."""
    payload = {
        "rank": rank,
        "message": str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "is_ours": isinstance(error, PacelineError),
        "is_consequence": isinstance(error, CommunicationError),
    }
    path = folder / "logs" / f"rank-{rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=2), encoding="utf-8")


def read_failures(folder: Path) -> list[Failure]:
    """Reads what failed ranks left."""
    found = []
    for path in sorted((folder / "logs").glob("rank-*.error.json")):
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found.append(Failure(**values))
    return found


def clear_failures(folder: Path) -> None:
    """Forgets the failures of an earlier attempt."""
    for path in (folder / "logs").glob("rank-*.error.json"):
        path.unlink()


def killed_rank(rank: int, exit_code: int, at: float) -> Failure:
    """Describes a rank that left no error: it was killed, or left the process without a word."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = "\n  SIGKILL often means that the machine ran out of memory" if name == "SIGKILL" else ""
        message = f"killed by {name}{hint}"
    else:
        message = f"left with exit code {exit_code} and no error"
    return Failure(rank=rank, message=message, traceback="", time=at, is_ours=True, is_consequence=False)


def explain_failures(failures: list[Failure], folder: Path) -> LaunchError:
    """Makes the one error that the user sees."""
    if not failures:
        return LaunchError(f"the ranks ended without a result or an error\n  see {folder / 'logs'}")
    cause = min(failures, key=lambda failure: (failure.is_consequence, failure.time))
    log = folder / "logs" / f"rank-{cause.rank}.log"
    detail = "" if cause.is_ours or not cause.traceback else f"\n\n{cause.traceback.rstrip()}\n"
    return LaunchError(f"rank {cause.rank} failed: {cause.message}{detail}\n  its log is {log}")
