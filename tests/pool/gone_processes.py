"""Whether processes of others have ended: gone, or left behind by a parent that has not asked for them yet."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil


def is_running(pid: int) -> bool:
    """Says whether a process can still do something. It may end at any moment, also between two questions."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Collection[int], within_s: float = 120.0) -> None:
    """Returns when none of the processes is running any more."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} are still there"
        time.sleep(0.01)
