"""What keeps a process from running, as the system sees it from outside: a stopped process cannot say it itself.

    T   stopped by a signal (SIGSTOP, Ctrl-Z), until SIGCONT comes
    t   held by a debugger
    D   in a wait of the kernel that no signal ends: a disk, a file server, memory that is swapped in
    Z   ended, and not waited for yet

A process whose cgroup is frozen shows as sleeping or as D, so that the cgroup is asked. A look costs some tens of
microseconds: it is for ranks that have not moved for a while.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What a process does. ``halted`` says what stopped it from outside; empty: nothing did.

    ``is_blocked``: the kernel waits for something on its behalf. ``page_faults`` counts pages that had to be read from
    a disk, so far.
    """

    halted: str = ""
    is_blocked: bool = False
    page_faults: int = 0


def look_at_process(pid: int) -> ProcessState | None:
    """Returns what a process does; None where it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if _PROC.joinpath("self").exists() else _ask_psutil(pid)
    except OSError:
        return ProcessState()
    state = fields[0]
    if state in "ZX":
        return None
    halted = ""
    if state == "T":  # the system hides the signal that stopped it from other users, who see 0
        number = int(fields[-1])
        halted = f"stopped ({signal.Signals(number).name if number in set(signal.Signals) else 'SIGSTOP'})"
    elif state == "t":
        halted = f"held by a debugger{_tracer(pid)}"
    elif state in "SD":
        halted = _frozen(pid)
    return ProcessState(halted=halted, is_blocked=state == "D" and not halted, page_faults=int(fields[9]))


def _ask_psutil(pid: int) -> ProcessState | None:
    """Looks on systems without /proc."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return ProcessState()
    if status == psutil.STATUS_ZOMBIE:
        return None
    return ProcessState(halted="stopped (SIGSTOP)" if status == psutil.STATUS_STOPPED else "")


def _tracer(pid: int) -> str:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = (_PROC / str(pid) / "status").read_text().splitlines()
        number = next(line.split()[1] for line in status if line.startswith("TracerPid:"))
        return f" ({(_PROC / number / 'comm').read_text().strip()}, process {number})"
    return ""


def _frozen(pid: int) -> str:
    """Says which cgroup of a process is frozen; empty where none is, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "cgroup").read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            inner = name.lstrip("/")
            if number == "0":
                roots = (_CGROUPS, _CGROUPS / "unified")
                events = next((path for root in roots if (path := root / inner / "cgroup.events").exists()), None)
                is_frozen = events is not None and "frozen 1" in events.read_text()
            elif controllers == "freezer":
                state = _CGROUPS / "freezer" / inner / "freezer.state"
                is_frozen = state.exists() and state.read_text().strip() != "THAWED"
            else:
                continue
            if is_frozen:
                return f"frozen (cgroup {name})"
    return ""
