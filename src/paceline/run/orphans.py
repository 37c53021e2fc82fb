"""No process is left behind: a rank goes when its launcher goes, and takes what it started with it.

A rank leads a process group of its own, as the agent starts it in a new session. Its loader workers are in that group,
and so can be ended with it, and also after it.

The rank asks for its parent twice a second. Linux could send it a signal at once (PR_SET_PDEATHSIG), but one that ends
the rank ends it before it can end its loader workers, and macOS has none.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def end_with_parent(parent: int, *, every_s: float = 0.5) -> None:
    """Ends this process, and all in its group if it leads one, as soon as process ``parent`` is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != parent:
        os._exit(1)  # it went while this process was starting
    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_children() -> None:
    """Ends the processes that this one started with multiprocessing, such as loader workers."""
    for child in multiprocessing.active_children():
        child.kill()


def end_groups(leaders: Iterable[int], *, patience_s: float = 2.0) -> None:
    """Ends what is left of the process groups of ``leaders``, who may be gone: asks first, then insists."""
    left = {leader for leader in leaders if _signal_group(leader, signal.SIGTERM)}
    deadline = time.monotonic() + patience_s
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= _living_groups()
    for leader in left:
        _signal_group(leader, signal.SIGKILL)


def note_process(folder: Path, rank: int, launcher: int | None = None) -> None:
    """Leaves this rank's process number for the launcher: with the host and the launcher, as folders may be shared."""
    text = f"{os.getpid()} {socket.gethostname()} {launcher or ''}".rstrip()
    (folder / "logs" / f"rank-{rank}.pid").write_text(f"{text}\n", encoding="utf-8")


def noted_processes(folder: Path, launcher: int | None = None) -> dict[int, int]:
    """Returns the process of each rank that noted one on this host, by rank; those of one launcher if it is given."""
    found = {}
    for path in sorted((folder / "logs").glob("rank-*.pid")):
        words = path.read_text(encoding="utf-8").split()
        is_here = len(words) < 2 or words[1] == socket.gethostname()
        is_ours = launcher is None or len(words) < 3 or int(words[2]) == launcher
        if words and is_here and is_ours:
            found[int(path.stem.removeprefix("rank-"))] = int(words[0])
    return dict(sorted(found.items()))


def forget_processes(folder: Path, launcher: int | None = None) -> None:
    """Removes the notes, of one launcher's ranks if it is given: process numbers are used again."""
    ours = None if launcher is None else noted_processes(folder, launcher)
    for path in (folder / "logs").glob("rank-*.pid"):
        if ours is None or int(path.stem.removeprefix("rank-")) in ours:
            path.unlink(missing_ok=True)


def _signal_group(leader: int, number: int) -> bool:
    """Sends a signal to a group; says whether there is one."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # the latter on macOS, for a group of zombies
        return False
    return True


def _living_groups() -> set[int]:
    """Returns the groups that have a process which still runs: one that nobody has waited for yet does not."""
    found = set()
    for process in psutil.process_iter(["status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                found.add(os.getpgid(process.pid))
    return found
