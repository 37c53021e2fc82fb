"""Signals that end a run or ask it to make room, in the launcher and in the ranks; and the launcher's scratch folders.

[Note: preemption] SIGTERM (Kubernetes, Slurm), SIGUSR1 and SIGUSR2 (what users ask Slurm for) ask a run to make room.
The launcher hands them on to the ranks, which save and leave together after the same step
(``train/survive/hooks.py``). A second one after five seconds or more ends the run at once, and so does the end of
the grace time; what comes within five is the same request, which schedulers and launchers send on one after another.

[Note: scratch folders] They hold sockets and early output, and are their user's alone (0700). Their process holds a
lock in each: a folder whose lock can be had is nobody's any more, and is removed when the next one is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from paceline.health.exit_codes import PREEMPTED

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BY_SIGNAL = 128  # plus its number: the code of a rank that a signal ended before it had saved
_HANDLED = (*ENDING, *PREEMPTING)
_SAME_REQUEST_S = 5.0
_PREFIX, _LOCK = "paceline-run-", ".lock"
_MAKING_S = 60.0  # between a folder and its lock, at most
_HELD: dict[Path, int] = {}  # with the process that made it: for one that leaves without unwinding its blocks


def leave_early() -> None:
    """Has a preempting signal that nobody handles end this process with code 75 until it starts ranks."""
    for number in PREEMPTING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave_early)


def _leave_early(*_: object) -> NoReturn:
    os.write(2, b"paceline: preempted: no step was trained yet\n")
    remove_held()
    os._exit(PREEMPTED)


def hear_requests(ask: Callable[[int], None], *, grace_s: float, leave: Callable[[int], object]) -> None:
    """Calls ``ask(number)`` for the first preempting signal, and ``leave(128 + number)`` after the grace time."""
    first_at: float | None = None

    def hear(number: int, _: FrameType | None) -> None:
        nonlocal first_at
        now = time.monotonic()
        if first_at is None:
            first_at = now
            ask(number)
            timer = threading.Timer(grace_s, leave, (BY_SIGNAL + number,))
            timer.daemon = True
            timer.start()
        elif now - first_at >= _SAME_REQUEST_S:
            leave(BY_SIGNAL + number)

    for number in PREEMPTING:
        signal.signal(number, hear)


@contextlib.contextmanager
def launcher_signals(
    processes: Callable[[], Iterable[int]], stop: Callable[[int], object]
) -> Iterator[list[signal.Signals]]:
    """Calls ``stop(number)`` for signals from the first moment on, and restores their handlers in the end.

    A signal that is ignored stays so. Those of [Note: preemption] go to ``processes`` first, and are yielded.
    """
    asked: list[signal.Signals] = []
    asked_at = 0.0

    def hand_on(number: int, _: FrameType | None) -> None:
        nonlocal asked_at
        now, ranks = time.monotonic(), list(processes())
        if asked and now - asked_at < _SAME_REQUEST_S:
            return
        if asked or not ranks:
            stop(number)
        asked.append(signal.Signals(number))
        asked_at = now
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    for number in PREEMPTING:
        if signal.getsignal(number) is _leave_early:  # what ends this process from now on is the launcher's matter
            signal.signal(number, signal.SIG_DFL)
    with _handlers_restored() as before:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, hand_on if number in PREEMPTING else lambda number, _: stop(number))
        yield asked


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Lets a short piece of work finish whatever signals come; the command line still counts Ctrl-C."""
    with _handlers_restored() as before:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else lambda *_: None)
        yield


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread; signals wait until it runs, as an exception inside of ``Thread.start`` leaves half a thread."""
    if threading.current_thread() is not threading.main_thread():  # the only one that handles signals
        thread.start()
        return
    came: list[int] = []
    with _handlers_restored() as before:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, lambda number, _: came.append(number))
        thread.start()
    for each in came:
        before[signal.Signals(each)](each, None)


@contextlib.contextmanager
def polling(look: Callable[[], bool], *, every_s: float, name: str, patience_s: float | None = None) -> Iterator[None]:
    """Calls ``look`` in a thread until it returns True or the block is left; waits ``patience_s`` for its last call."""
    is_left = threading.Event()

    def follow() -> None:
        while not is_left.wait(every_s):
            if look():
                return

    with beside(threading.Thread(target=follow, name=name, daemon=True), is_left, patience_s):
        yield


@contextlib.contextmanager
def beside(thread: threading.Thread, is_over: threading.Event, patience_s: float | None) -> Iterator[None]:
    """Runs a thread beside the block, then sets ``is_over`` and waits for the thread's end, ``patience_s`` at most."""
    try:
        start_thread(thread)
        yield
    finally:
        is_over.set()
        if thread.ident is not None:  # None: a signal came before it was started
            thread.join(timeout=patience_s)


@contextlib.contextmanager
def interrupts_withheld() -> Iterator[None]:
    """Keeps Ctrl-C in a terminal from processes that are started in the block: whoever starts them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handlers_restored() -> Iterator[dict[signal.Signals, Any]]:
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def scratch_folder(where: Path | None = None) -> Iterator[Path]:
    """Makes a temporary folder for as long as the block runs; see [Note: scratch folders]."""
    where = where or Path(tempfile.gettempdir())
    _remove_leftovers(where)
    path = where / f"{_PREFIX}{secrets.token_hex(8)}"
    _HELD[path] = os.getpid()  # before it is there: an interrupt may come at any moment
    try:
        path.mkdir(mode=0o700)
        with (path / f"{_LOCK}.new").open("wb") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody finds it unlocked either
                fcntl.flock(lock, fcntl.LOCK_EX)
            (path / f"{_LOCK}.new").rename(path / _LOCK)  # locked when others can see it
            yield path
    finally:
        _remove(path)


def remove_held() -> None:
    """Removes the folders of this process, which leaves at once: without unwinding the blocks that hold them."""
    for path, process in list(_HELD.items()):
        if process == os.getpid():
            _remove(path)


def _remove(path: Path) -> None:
    for _ in range(3):  # another thread may still write there
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            break
    _HELD.pop(path, None)


def _remove_leftovers(where: Path) -> None:
    for path in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it went meanwhile, or its process holds the lock
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            try:
                with (path / _LOCK).open("r+b") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                if time.time() - path.stat().st_mtime <= _MAKING_S:
                    continue
            shutil.rmtree(path, ignore_errors=True)
