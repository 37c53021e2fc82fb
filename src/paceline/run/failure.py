"""Why a run failed, in one message: the cause, not its consequences.

A rank that raises leaves ``logs/rank-<r>.error.json``; one that was killed leaves an exit code. When one rank fails the
others lose their connection and fail too, or are ended, so the ranks are blamed in the order of ``Cause``:

    killed   by a signal that nobody sends because another rank failed, such as SIGKILL or SIGSEGV
    raised   an error of its own
    died     without a word: an exit code and nothing else, or an abort
    stuck    waited for another rank until the time was over
    ended    by SIGTERM or its like: by somebody else, or by the agent once another rank has failed
    lost     the connection to another rank
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    DataError,
    LaunchError,
    MemoryExhaustedError,
    PacelineError,
    RunFolderError,
    UsageError,
)
from paceline.run.codes import FAILED, HUNG
from paceline.train.survive.recovery import MISTAKES, Kind

Cause = Literal["killed", "raised", "died", "stuck", "ended", "lost"]

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LAST_FRAMES = 5
_MOST_LINES = 20
_SMALL_BYTES = 2**16
_ENDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_NUMBER = re.compile(r"\[Errno (\d+)\]")
_ANOTHER = re.compile(r"rank (\d+): ")  # whose problem all ranks were told
_LOST = ("closed by peer", "reset by peer", "Broken pipe")
_DISK = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "files may not grow that large here (see ulimit -f)",
    errno.EROFS: "the disk is read-only: set monitor.folder=... elsewhere",
}
_FORBIDDEN = dict.fromkeys((errno.EACCES, errno.EPERM), "the permission to write there is gone: give it back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank failed. ``traceback`` is empty where the message says it all.

    ``is_refusal``: what was asked for cannot be, which was found before training began. ``kind`` is what decides
    whether ranks are started again.
    """

    rank: int
    cause: Cause
    message: str
    traceback: str = ""
    time: float
    is_refusal: bool = False
    kind: Kind = "error"

    def __str__(self) -> str:
        if self.is_refusal or self.kind == "hang":
            return self.message
        another = _ANOTHER.match(self.message)
        if another is not None:
            return f"rank {another[1]} failed: {self.message[another.end() :]}"
        if self.message.startswith(f"rank {self.rank} "):
            return self.message  # it begins as this would
        verb = "failed: " if self.cause in ("raised", "stuck", "lost") else ""
        return f"rank {self.rank} {verb}{self.message}"


class RunFailedError(LaunchError):
    """A run that ended because a rank failed: ``cause``; ``code`` is what the launcher leaves with."""

    def __init__(self, message: str, cause: Failure, code: int = FAILED) -> None:
        self.cause = cause
        self.code = code
        super().__init__(message)


class RunPreemptedError(LaunchError):
    """A run that was asked to make room, and has saved its state."""


class RunStoppedError(LaunchError):
    """A run that a signal ended, such as Ctrl-C's SIGINT."""

    def __init__(self, number: int, note: str = "") -> None:
        self.number = number
        name = signal.Signals(number).name
        super().__init__(f"ended by {name}{' (Ctrl-C)' if name == 'SIGINT' else ''}; no rank is left{note}")


def describe_error(rank: int, error: BaseException, *, is_refusal: bool = False) -> Failure:
    """Tells a rank's error in a message, and in as much of its traceback as helps."""
    text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    hints = {**_DISK, **_FORBIDDEN} if isinstance(error, CheckpointError) else _DISK
    disk = next((hints[number] for number in map(_error_number, _chain(error)) if number in hints), "")
    return Failure(
        rank=rank,
        cause=_cause(error),
        message=text.removeprefix(f"rank {rank}: ") + (f"\n  {disk}" if disk else ""),
        traceback="" if disk and not _has_user_code(error) else user_traceback(error),
        time=time.time(),
        is_refusal=is_refusal,
        kind="refused" if is_refusal else "full_disk" if disk else _kind(error),
    )


def is_refusal(error: BaseException, *, is_built: bool, has_trained: bool) -> bool:
    """Says whether an error means that what was asked for cannot be, and not that something went wrong.

    Errors of the user's own code went wrong. Data and checkpoints can only be refused before the trainer ``is_built``,
    as later ones may be those of a full disk, and nothing is refused that ``has_trained``.
    """
    if has_trained or _has_user_code(error):
        return False
    if isinstance(error, ConfigError | UsageError):
        return True
    return isinstance(error, DataError | CheckpointError | RunFolderError) and not is_built


def write_failure(folder: Path, failure: Failure) -> None:
    """Leaves a rank's failure where the launcher finds it, whole or not at all."""
    path = folder / "logs" / f"rank-{failure.rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(asdict(failure), indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_failures(folder: Path) -> list[Failure]:
    """Reads what failed ranks left."""
    found = []
    for path in sorted((folder / "logs").glob("rank-*.error.json")):
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found.append(Failure(**values))
    return found


def forget_failure(folder: Path, rank: int) -> None:
    """Forgets how a rank failed in an earlier attempt."""
    (folder / "logs" / f"rank-{rank}.error.json").unlink(missing_ok=True)


def clear_failures(folder: Path) -> None:
    """Forgets the failures of an earlier attempt."""
    for path in (folder / "logs").glob("rank-*.error.json"):
        path.unlink(missing_ok=True)


def silent_failure(rank: int, exit_code: int, output: str = "") -> Failure:
    """Describes a rank that left no error: it was killed, or left the process without a word but its ``output``."""
    cause: Cause = "died"
    kind: Kind = "killed"
    if exit_code == HUNG:
        kind, cause, message = "hang", "stuck", "made no progress"
    elif exit_code < 0:
        number = -exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        message = f"was killed by {name}"
        if number in _ENDED:
            cause, message = "ended", f"was ended by {name}, which did not come from here"
        elif number != signal.SIGABRT:
            cause = "killed"
        if number == signal.SIGKILL:
            message += "\n  if nobody sent it, the machine ran out of memory (dmesg tells)"
    else:
        message = f"left with exit code {exit_code} and no error"
    tail = "\n".join(output.strip().splitlines()[-_MOST_LINES:])
    return Failure(rank=rank, cause=cause, message=message, traceback=tail, time=time.time(), kind=kind)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Returns the failure that led to the others."""
    order = get_args(Cause)
    return min(failures, key=lambda failure: (order.index(failure.cause), failure.time))


def explain_failures(failures: list[Failure], folder: Path) -> PacelineError:
    """Makes the one error that the user sees: UsageError for what was refused, RunFailedError for what went wrong."""
    logs = folder / "logs"
    if not failures:
        return LaunchError(f"the ranks ended without a result or an error\n  their logs are in {logs}")
    cause = first_cause(failures)
    if cause.is_refusal:
        return UsageError(cause.message)
    detail = f"\n\n{cause.traceback.rstrip()}\n" if cause.traceback else ""
    if cause.cause == "died" and shutil.disk_usage(folder).free < _SMALL_BYTES:
        detail += f"\n  the disk of {folder} is full, so that it could not say why: free some space"
        cause = replace(cause, kind="full_disk")  # starting again would not help
    code = HUNG if cause.kind == "hang" else FAILED
    return RunFailedError(f"{cause}{detail}\n  its log is {logs / f'rank-{cause.rank}.log'}", cause, code)


def user_traceback(error: BaseException) -> str:
    """Formats a traceback from the first line of the user's code on; the frames before are ours and torch's.

    Empty where the message says it all: an error of ours in which the user's code took no part, or a lost connection.
    Of a foreign error in which it took none, the last few frames are left.
    """
    if _is_lost(error) or (isinstance(error, PacelineError) and not _has_user_code(error)):
        return ""
    beneath = error
    while isinstance(beneath, PacelineError) and beneath.__cause__ is not None:
        beneath = beneath.__cause__  # ours repeats what it says
    summary = traceback.TracebackException.from_exception(beneath if _has_user_code(beneath) else error)
    _trim(summary)
    return "".join(summary.format()).rstrip()


def _has_user_code(error: BaseException) -> bool:
    """Says whether an error came through the user's code; a note is the traceback of a loader worker, as text."""
    return any(
        getattr(each, "__notes__", ())
        or any(_is_users(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(each.__traceback__))
        for each in _chain(error)
    )


def _trim(summary: traceback.TracebackException) -> None:
    """Cuts the frames before the user's code from an error, and from those that it came from."""
    frames = list(summary.stack)
    first = next((place for place, frame in enumerate(frames) if _is_users(frame.filename)), -_LAST_FRAMES)
    summary.stack = traceback.StackSummary.from_list(frames[first:])
    for chained in (summary.__cause__, summary.__context__):
        if chained is not None:
            _trim(chained)


def _is_users(filename: str) -> bool:
    if filename.startswith((_PACKAGE + os.sep, "<frozen ")) or "-packages/torch/" in filename:
        return False
    return "-packages" + os.sep in filename or not filename.startswith(_STANDARD_LIBRARY + os.sep)


def _cause(error: BaseException) -> Cause:
    if _is_lost(error):
        return "lost"
    # Its children name their own cause: a mismatch, a verdict.
    return "stuck" if type(error) is CommunicationError else "raised"


def _kind(error: BaseException) -> Kind:
    """Says what sort of error it is, by what it came from."""
    if _is_lost(error):
        return "lost"
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(each, MemoryExhaustedError | MemoryError) for each in causes) or any(
        type(each).__name__ == "OutOfMemoryError" for each in causes
    ):
        return "out_of_memory"
    return "mistake" if any(type(each).__name__ in MISTAKES for each in causes) else "error"


def _is_lost(error: BaseException) -> bool:
    """Says whether a connection broke: to a rank that is gone. The user's code may have used torch.distributed too."""
    return any(
        isinstance(each, CommunicationError | RuntimeError) and any(sign in str(each) for sign in _LOST)
        for each in _chain(error)
    )


def _error_number(error: BaseException) -> int | None:
    """Returns the system's number of an error; of a checkpoint's, that of the rank which told the others in words."""
    if isinstance(error, OSError):
        return error.errno
    found = _NUMBER.search(str(error)) if isinstance(error, CheckpointError) else None
    return None if found is None else int(found[1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that it came from."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
