"""Signals that end a run or ask it to make room, in the launcher and in the ranks.

[Note: preemption] SIGTERM (Kubernetes, Slurm), SIGUSR1 and SIGUSR2 (what users ask Slurm for) ask a run to make room.
The launcher hands them on to the ranks, which save and leave together after the same step
(``train/survive/hooks.py``). A second one after five seconds or more ends the run at once, and so does the end of
the grace time. Schedulers signal all processes of a job, launchers hand signals on, and on busy hosts that takes
seconds: what comes within five is the same request. Where torch's agent cannot be told which signals to leave alone,
it takes SIGTERM itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

from paceline.health.exit_codes import PREEMPTED

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BY_SIGNAL = 128  # plus its number: the code of a rank that a signal ended before it had saved
_HANDLED = (*ENDING, *PREEMPTING)
_SAME_REQUEST_S = 5.0


def leave_early() -> None:
    """Has a preempting signal end this process with code 75 until it starts ranks: it has trained nothing yet.

    Signals that somebody else handles, or ignores, stay as they are.
    """
    for number in PREEMPTING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave_early)


def _leave_early(*_: object) -> NoReturn:
    os.write(2, b"paceline: preempted: no step was trained yet\n")
    scratch = sys.modules.get("paceline.run.scratch")  # not imported here: an import may be what is interrupted
    if scratch is not None and hasattr(scratch, "remove_held"):
        scratch.remove_held()
    os._exit(PREEMPTED)


def hear_requests(ask: Callable[[int], None], *, grace_s: float, leave: Callable[[int], object]) -> None:
    """Calls ``ask(number)`` for the first preempting signal, and ``leave(128 + number)`` when the grace time is over.

    Called in the main thread.
    """
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

    torch's agent does the same, but only once it starts ranks, and keeps its handlers. A signal that is ignored stays
    ignored: with nohup, a run outlives its terminal. Those of [Note: preemption] go to the ranks' ``processes`` first;
    yields the list of those that did.
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
    """Starts a thread; a signal that comes meanwhile is handled as soon as the thread runs.

    An exception of a handler inside of ``Thread.start`` would leave half a thread behind, which prints a traceback.
    """
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
def polling(
    look: Callable[[threading.Event], bool], *, every_s: float, name: str, patience_s: float | None = None
) -> Iterator[None]:
    """Calls ``look`` in a thread every ``every_s`` seconds, until it returns True or the block is left.

    The event that ``look`` gets is set when the block is left. A call that is under way then is waited for, at most
    ``patience_s`` seconds; None: until it is done.
    """
    is_left = threading.Event()

    def follow() -> None:
        while not is_left.wait(every_s):
            if look(is_left):
                return

    thread = threading.Thread(target=follow, name=name, daemon=True)
    try:
        start_thread(thread)
        yield
    finally:
        is_left.set()
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
