"""What input may never do: run code, write outside of its folder, hang, take memory without end, end in a traceback.

A hook for Python's audit events sees every file that is opened for writing, every process, connection and unpickled
name. It cannot be removed again, and does nothing while nothing is watched.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.errors import PacelineError

LIMIT_S = 5.0
LIMIT_BYTES = 2**30
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pickle.find_class")
_NETWORK = ("socket.connect", "socket.bind", "socket.sendto")
# Which arguments are paths, and which are descriptors of folders that these are relative to: rmtree goes that way.
_CHANGES = {
    "os.remove": ((0,), (1,)),
    "os.rename": ((0, 1), (2, 3)),
    "os.rmdir": ((0,), (1,)),
    "os.mkdir": ((0,), (2,)),
    "os.link": ((0, 1), (2, 3)),
    "os.symlink": ((1,), (2,)),
    "os.truncate": ((0,), ()),
    "os.chmod": ((0,), (2,)),
    "shutil.rmtree": ((0,), ()),
}


class Hang(BaseException):
    """Raised where an input takes longer than the limit. No Exception: nobody is to catch it."""


@dataclass(slots=True)
class _Watch:
    """What is watched now: nothing without a folder."""

    folder: str = ""
    seen: list[str] = field(default_factory=list)


_WATCH = _Watch()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCH.folder:
        return
    if event in _CODE or event in _NETWORK:
        _WATCH.seen.append(f"{event} {arguments!r:.200}")
    elif event == "open":
        path, _, flags = arguments
        if flags & _WRITES and not isinstance(path, int) and path is not None:
            _note_write(event, path)
    elif event in _CHANGES:
        paths, folders = _CHANGES[event]
        if all(arguments[each] in (None, -1) for each in folders):
            for each in paths:
                _note_write(event, arguments[each])


def _note_write(event: str, path: Any) -> None:
    place = os.path.realpath(os.fsdecode(path))
    if place != os.devnull and not place.startswith((_WATCH.folder + os.sep, "/proc/self/")) and place != _WATCH.folder:
        _WATCH.seen.append(f"{event} {place}")


_IS_HOOKED: list[bool] = []


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Yields a list that fills with what happens and must not: code, connections, writes outside of ``folder``."""
    if not _IS_HOOKED:
        sys.addaudithook(_hook)
        _IS_HOOKED.append(True)
    keeps_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _WATCH.seen = []
    _WATCH.folder = os.path.realpath(folder)
    try:
        yield _WATCH.seen
    finally:
        _WATCH.folder = ""
        sys.dont_write_bytecode = keeps_none


@contextlib.contextmanager
def bounded(seconds: float = LIMIT_S, num_bytes: int = LIMIT_BYTES) -> Iterator[None]:
    """Raises Hang after the time, and lets no more memory be had than there is now and ``num_bytes``.

    The time is that of the processor, as a busy machine lets others go first; of the clock it is ten times as much.
    """

    def ring(_: int, frame: FrameType | None) -> None:
        raise Hang("".join(traceback.format_stack(frame)[-6:]))

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)}
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_text(text: str) -> bool:
    return text.encode("utf-8", "ignore").decode() == text


def verdict_of(run: Callable[[], object], folder: Path) -> str:
    """Runs something on an input; returns what it did that it must not, in words. Empty: nothing."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a terminal
    problem = ""
    with watched(folder) as seen:
        try:
            with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                run()
        except PacelineError as error:
            if not _is_text(str(error)):
                problem = f"what is told cannot be printed: {error!r}"
        except SystemExit:
            pass
        except Hang as error:
            problem = f"took more than {LIMIT_S} s\n{error}"
        except BaseException:  # a traceback is what is looked for
            problem = traceback.format_exc()
    return "\n".join([*seen, problem]).strip()
