"""How one rank failed: facts, gathered from its error, its exit code, or the verdict on all ranks.

A rank that raises describes its error. For one that was killed the launcher has the exit code, and the rank's ledger
says where it was. ``diagnosis.py`` finds the one failure that led to the others.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from paceline import errors
from paceline.health.exit_codes import HUNG
from paceline.health.ledger_view import LedgerView
from paceline.health.verdict import HangVerdict

Cause = Literal["killed", "raised", "died", "stuck", "ended", "lost"]
FailureKind = Literal[
    "killed", "error", "mistake", "out_of_memory", "full_disk", "hang", "lost", "refused", "preempted", "hosts"
]

# Errors of the program and not of its surroundings: they come again.
_MISTAKES = (AssertionError, AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LAST_FRAMES = 5
_MOST_LINES = 20
_ENDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_WAITED = (errors.CommunicationError, errors.LateRankError)  # others of its children name their own cause
_NUMBER = re.compile(r"\[Errno (\d+)\]")
_ANOTHER = re.compile(r"rank (\d+): ")  # whose problem all ranks were told
# NCCL reports to a thread of torch, which writes this into the rank's log and aborts the process.
_ABORTED_BY_NCCL: Final[dict[str, tuple[Cause, FailureKind, str]]] = {
    "ncclRemoteError": ("lost", "lost", "NCCL lost the connection to another rank"),
    "collective operation timeout": ("stuck", "error", "NCCL waited in vain for another rank"),
}
_DISK = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "files may not grow that large here (see ulimit -f)",
    errno.EROFS: "the disk is read-only: set monitor.folder=... elsewhere",
}
_TOO_MANY = "no more files can be opened: some are left open (see ulimit -n)"
_NO_FILES = {errno.EMFILE: _TOO_MANY, errno.ENFILE: _TOO_MANY}
_FORBIDDEN = dict.fromkeys((errno.EACCES, errno.EPERM), "the permission to write there is gone: give it back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank failed; ``kind`` decides about restarts. ``is_refusal``: found before training, it cannot be."""

    rank: int
    cause: Cause
    message: str
    traceback: str = ""
    time: float
    is_refusal: bool = False
    kind: FailureKind = "error"
    blamed: int | None = None  # by a verdict, where that is another rank

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


def describe_error(rank: int, error: BaseException, *, is_refusal: bool = False) -> Failure:
    """Describes a rank's error: its message, its kind, and the part of its traceback that helps."""
    text = str(error) if isinstance(error, errors.PacelineError) else f"{type(error).__name__}: {error}"
    hints = {**_DISK, **_FORBIDDEN} if isinstance(error, errors.CheckpointError) else _DISK
    numbers = list(map(_error_number, _chain(error)))
    disk = next((hints[number] for number in numbers if number in hints), "")
    hint = disk or next((_NO_FILES[number] for number in numbers if number in _NO_FILES), "")
    return Failure(
        rank=rank,
        cause="lost" if _is_lost(error) else "stuck" if type(error) in _WAITED else "raised",
        message=text.removeprefix(f"rank {rank}: ") + (f"\n  {hint}" if hint else ""),
        traceback="" if disk and not _has_user_code(error) else user_traceback(error),
        time=time.time(),
        is_refusal=is_refusal,
        kind="refused" if is_refusal else "full_disk" if disk else _kind(error),
    )


def is_refusal(error: BaseException, *, is_built: bool, has_trained: bool) -> bool:
    """Says whether an error means that what was asked for cannot be, and not that something went wrong.

    The user's own errors went wrong. Data and checkpoints are refused before the trainer ``is_built``: later ones may
    be of a full disk. Nothing is refused that ``has_trained``.
    """
    if has_trained or _has_user_code(error):
        return False
    if isinstance(error, errors.ConfigError | errors.UsageError):
        return True
    return isinstance(error, errors.DataError | errors.CheckpointError | errors.RunFolderError) and not is_built


def silent_failure(rank: int, exit_code: int, output: str = "", log: str = "") -> Failure:
    """Describes a rank that left no error, by its exit code, its ``output``, and the end of its ``log``."""
    cause: Cause = "died"
    kind: FailureKind = "killed"
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
        else:
            told = (found for sign, found in _ABORTED_BY_NCCL.items() if sign in log)
            cause, kind, message = next(told, (cause, kind, message))
        if number == signal.SIGKILL:
            message += "\n  if nobody sent it, the machine ran out of memory (dmesg tells)"
    else:
        message = f"left with exit code {exit_code} and no error"
    tail = "\n".join(output.strip().splitlines()[-_MOST_LINES:])
    return Failure(rank=rank, cause=cause, message=message, traceback=tail, time=time.time(), kind=kind)


def failure_of_verdict(verdict: HangVerdict, rank: int, report: Path) -> Failure:
    """Returns the failure of a rank that the verdict ended; those of the blamed ranks come first in time."""
    is_later = bool(verdict.ranks) and rank not in verdict.ranks
    message, blamed = f"{verdict.sentence}\n  what every rank does is in {report}", min(verdict.ranks, default=rank)
    when = time.time() + is_later
    return Failure(rank=rank, cause="stuck", message=message, time=when, kind="hang", blamed=blamed)


def locate_death(failure: Failure, ledger: LedgerView) -> tuple[Failure, HangVerdict]:
    """Adds to the failure of a rank that was killed or left without a word where it was, by its ledger."""
    last = f", after {ledger.entries[-1].call} at {ledger.entries[-1].site}" if ledger.entries else ""
    head, *rest = failure.message.split("\n")
    where = f"in phase {ledger.phase}, {ledger.step} steps after its start{last}"
    verdict = HangVerdict(kind="dead", ranks=(failure.rank,), sentence=f"rank {failure.rank} {head} {where}")
    return replace(failure, message="\n".join([head, f"  it was {where}", *rest])), verdict


def user_traceback(error: BaseException) -> str:
    """Formats a traceback from the first line of the user's code on; the frames before are ours and torch's.

    Empty for errors of ours without the user's code, and lost connections; of foreign ones without it, the last frames.
    """
    if _is_lost(error) or (isinstance(error, errors.PacelineError) and not _has_user_code(error)):
        return ""
    causes = list(_chain(error, by_context=False))  # ours repeats what its cause says
    beneath = next((each for each in causes if not isinstance(each, errors.PacelineError)), causes[-1])
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


def _kind(error: BaseException) -> FailureKind:
    if _is_lost(error):
        return "lost"
    causes = list(_chain(error, by_context=False))
    is_torchs = any(type(each).__name__ == "OutOfMemoryError" for each in causes)  # torch is not imported here
    if is_torchs or any(isinstance(each, errors.MemoryExhaustedError | MemoryError) for each in causes):
        return "out_of_memory"
    is_permanent = isinstance(error, errors.BadSampleError) or any(isinstance(each, _MISTAKES) for each in causes)
    return "mistake" if is_permanent else "error"


def _is_lost(error: BaseException) -> bool:  # by the user's code too, which may use torch.distributed
    return any(map(errors.is_connection_lost, _chain(error)))


def _error_number(error: BaseException) -> int | None:
    """Returns the system's number of an error; of a checkpoint's, that of the rank which told the others in words."""
    if isinstance(error, OSError):
        return error.errno
    found = _NUMBER.search(str(error)) if isinstance(error, errors.CheckpointError) else None
    return None if found is None else int(found[1])


def _chain(error: BaseException, *, by_context: bool = True) -> Iterator[BaseException]:
    """Yields an error and those that it came from, each once: user code may raise an error from itself."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        follows_context = by_context and not current.__suppress_context__
        current = current.__cause__ or (current.__context__ if follows_context else None)
