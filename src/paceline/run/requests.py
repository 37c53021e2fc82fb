"""Signals that ask a rank to make room: SIGTERM (Kubernetes, Slurm), SIGUSR1 and SIGUSR2 (what users ask Slurm for).

The first asks the loop to save and leave; all ranks do so after the same step (``train/survive/consensus.py``). One
that comes a second or more after it ends the rank at once, and so does the end of the grace time. What comes within
that second is the same request: schedulers signal every process of a job, and launchers hand signals on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SAME_REQUEST_S = 1.0
BY_SIGNAL = 128  # plus its number: the code of a rank that a signal ended before it had saved


def note_preemption(folder: Path) -> None:
    """Leaves word that the ranks have saved and left because they were asked to."""
    (folder / "logs" / "preempted").touch()


def was_preempted(folder: Path, *, since: float) -> bool:
    """Says whether ranks left such word after a time."""
    try:
        return (folder / "logs" / "preempted").stat().st_mtime >= since
    except OSError:
        return False


def hear_requests(ask: Callable[[int], None], *, grace_s: float, leave: Callable[[int], object]) -> None:
    """From now on calls ``ask(number)`` for the first such signal, and ``leave(128 + number)`` if that takes too long.

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
        elif now - first_at >= SAME_REQUEST_S:
            leave(BY_SIGNAL + number)

    for number in PREEMPTING:
        signal.signal(number, hear)
