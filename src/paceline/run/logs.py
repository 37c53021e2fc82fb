"""What a run tells people: ``logs/rank-<r>.log`` of each rank, ``logs/run.log`` of the run, and lines on the terminal.

    2026-11-17 09:30:01.250 rank 0 INFO paceline: step 10, loss 1.93

A rank's log has what its process prints or hands to Python's ``logging``, warnings and uncaught exceptions too. The
run's log has what the launcher tells, the lines of rank 0, and warnings and errors of all ranks. Nothing reads them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from paceline.run.signals import polling
from paceline.terminal import echo

_LOGGER = logging.getLogger("paceline")
_LOOK_S = 0.2


class _Lines(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__("%(asctime)s %(who)s %(levelname)s %(name)s: %(message)s")
        self.default_msec_format = "%s.%03d"
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        if not hasattr(record, "who"):
            name = record.threadName or ""
            is_virtual = name.startswith("rank-") and name[5:].isdecimal()  # virtual ranks share a process
            record.who = name.replace("-", " ") if is_virtual else self._who
        return super().format(record)


class _Appended(logging.FileHandler):
    """Appends lines to a file that others append to as well; what a full disk does not take is lost."""

    def __init__(self, path: Path, who: str) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(_Lines(who))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        del record


def log(level: int, text: str) -> None:
    """Writes a line into the log of this process, also while ``logging.disable`` silences torch's agent."""
    record = _LOGGER.makeRecord(_LOGGER.name, level, __file__, 0, text, (), None)
    for handler in _LOGGER.handlers:
        if level >= handler.level:
            handler.handle(record)
    if not _LOGGER.handlers:
        _LOGGER.log(level, "%s", text)


def append_line(path: Path, who: str, level: int, text: str) -> None:
    """Appends a line to the log of another process; a disk that is full is left alone."""
    record = _LOGGER.makeRecord(_LOGGER.name, level, __file__, 0, text, (), None, extra={"who": who})
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(_Lines(who).format(record) + "\n")


@contextlib.contextmanager
def run_log(folder: Path, *, who: str = "launcher", is_shown: bool = False) -> Iterator[None]:
    """Lets this process write the log of a run; with ``is_shown``, the terminal shows its lines as they come."""
    path = folder / "logs" / "run.log"
    with contextlib.ExitStack() as stack:
        try:
            handler = _Appended(path, who)
        except OSError:  # a run goes on without
            yield
            return
        _LOGGER.addHandler(handler)
        stack.callback(handler.close)
        stack.callback(_LOGGER.removeHandler, handler)
        stack.enter_context(_showing(path) if is_shown else contextlib.nullcontext())
        log(logging.INFO, f"the run in {folder} is started by process {os.getpid()}")
        try:
            yield
        except BaseException as error:
            log(logging.ERROR, f"the run has ended: {str(error) or type(error).__name__}")
            raise
        log(logging.INFO, "the run is done")


@contextlib.contextmanager
def rank_logs(folder: Path, rank: int, level: str, *, owns_output: bool) -> Iterator[None]:
    """Lets everything that this rank's process hands to ``logging`` go to the logs, warnings and exceptions too.

    The terminal shows warnings, unless the output goes there already (``owns_output``) or the user has handlers.
    """
    root, before, who = logging.getLogger(), logging.getLogger().level, f"rank {rank}"
    shared = _open(folder / "logs" / "run.log", who)
    shared.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handlers: list[logging.Handler] = [shared]
    if owns_output or not root.handlers:
        console = logging.StreamHandler(sys.stderr)
        console.setFormatter(_Lines(who))
        console.setLevel(logging.NOTSET if owns_output else logging.WARNING)
        handlers.append(console)
    if not owns_output:
        handlers.append(_open(folder / "logs" / f"rank-{rank}.log", who))
    hooks = sys.excepthook, threading.excepthook
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: _LOGGER.critical("uncaught exception", exc_info=error)
    threading.excepthook = _uncaught_in_thread
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(False)
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def _open(path: Path, who: str) -> logging.Handler:
    try:
        return _Appended(path, who)
    except OSError:
        return logging.NullHandler()


def _uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    name = "a thread" if arguments.thread is None else f"thread {arguments.thread.name}"
    _LOGGER.error("uncaught exception in %s", name, exc_info=arguments.exc_value)


@contextlib.contextmanager
def _showing(path: Path) -> Iterator[None]:
    """Shows what is appended to a log on the terminal, whole lines at a time."""
    offset = path.stat().st_size

    def show() -> bool:
        nonlocal offset
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(offset)
            lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            offset += len(whole)
            if whole:
                echo(whole.decode("utf-8", "replace"), err=True, nl=False)
        return False

    try:
        with polling(show, every_s=_LOOK_S, name="log"):
            yield
    finally:
        show()


def say(text: str) -> None:
    """Tells the user something that is not a result: on standard error, and in the log of the run if there is one."""
    echo(f"paceline: {text}", err=True)
    log(logging.INFO, text)


def tell(level: int, text: str) -> None:
    """Writes a line into the log of the run; warnings are told on standard error too."""
    log(level, text)
    if level >= logging.WARNING:
        echo(f"paceline: {text}", err=True)
