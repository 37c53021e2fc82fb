"""Where another process stands: it writes its stacks into a file when it is asked by a signal.

The handler is faulthandler's: it runs at once, also while the process sits in a C function, and needs no Python to
run. The signal is SIGURG, which does nothing to a process that knows nothing of this.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.comm.ledger.call_sites import ENGINE, LIBRARY, USER, kind_of_file, short_name

STACK_SIGNAL = signal.SIGURG
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$')
_LOOK_S = 0.02
_STEADY_S = 0.2  # on a busy machine a process may rest for so long in the middle of its stacks


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{short_name(self.filename)}:{self.line} in {self.function}"


def stack_path(folder: Path, pid: int) -> Path:
    """Returns where a process of a run writes its stacks, with those of all ranks that live in it."""
    return folder / "health" / f"process-{pid}.stack"


@cache
def dump_stacks_into(path: Path) -> None:
    """Lets this process write its stacks into ``path`` whenever it gets the signal; so do processes forked from it.

    Asked again for the same path, as by virtual ranks, it does nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Open as long as the handler may write.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)


def ask_for_stacks(asked: Iterable[tuple[int, Path]], *, patience_s: float = 2.0) -> dict[int, str]:
    """Asks processes for their stacks and returns what each wrote, by process; those that write nothing are left out.

    Costs the time until the last has written, and a little to see that no more comes; at most ``patience_s``.
    """
    waiting: dict[int, tuple[Path, int]] = {}
    for pid, path in asked:
        before = _size(path)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
            waiting[pid] = (path, before)
    found: dict[int, str] = {}
    deadline = time.monotonic() + patience_s
    grown = {pid: (before, deadline) for pid, (_, before) in waiting.items()}  # the last size, and since when
    while waiting and (now := time.monotonic()) < deadline:
        time.sleep(_LOOK_S)
        for pid, (path, before) in list(waiting.items()):
            size = _size(path)
            if size != grown[pid][0]:
                grown[pid] = (size, now)
            elif size > before and now - grown[pid][1] >= _STEADY_S:
                found[pid] = _read(path, before)
                del waiting[pid]
    for pid, (path, before) in waiting.items():
        if _size(path) > before:
            found[pid] = _read(path, before)
    return found


def parse_stacks(text: str) -> dict[int, list[Frame]]:
    """Reads what faulthandler wrote: the frames of each thread, innermost first, by the thread's number."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread is not None:
            frames = found.setdefault(int(thread.group(1), 16), [])
        elif frame is not None:
            frames.append(Frame(frame.group(1), int(frame.group(2)), frame.group(3)))
    return found


def telling_line(frames: Iterable[Frame]) -> str:
    """Returns the line that says most of frames, innermost first: the user's, a library's that we called, ours, any."""
    known = [(kind_of_file(frame.filename), frame) for frame in frames]
    first = next((place for place, (kind, _) in enumerate(known) if kind == ENGINE), len(known))
    users = [frame for kind, frame in known if kind == USER]
    libraries = [frame for kind, frame in known[:first] if kind == LIBRARY]  # those beyond call us: a command line
    ours = [frame for _, frame in known[first:]]
    chosen = next(iter([*users, *libraries, *ours, *(frame for _, frame in known)]), None)
    return "" if chosen is None else str(chosen)


def line_of_thread(text: str, thread: int) -> str:
    """Returns the telling line of one thread of a process; of its last, which is the first it started, if unknown."""
    stacks = parse_stacks(text)
    if not stacks:
        return ""
    mask = sys.maxsize * 2 + 1
    return telling_line(stacks.get(thread & mask, list(stacks.values())[-1]))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace")
