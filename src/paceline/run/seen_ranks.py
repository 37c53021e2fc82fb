"""The ranks of one host, as others see them: by their ledgers, and by what the system says of their processes.

A look costs microseconds a rank. ``watch.py`` looks some times a second, from the launcher of the ranks or from inside
one of them. A rank that has not moved for a while is looked at as a process, which costs tens of microseconds:

    T   stopped by a signal (SIGSTOP, Ctrl-Z), until SIGCONT comes
    t   held by a debugger
    D   in a wait of the kernel that no signal ends: a disk, a file server, memory that is swapped in
    Z   ended, and not waited for yet

A process whose cgroup is frozen shows as sleeping or as D, so that the cgroup is asked. Where a process stands, it
writes into a file when SIGURG asks it, by faulthandler also in a C function; to others SIGURG does nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil

from paceline.comm.ledger.call_sites import ENGINE, LIBRARY, USER, kind_of_file, short_name
from paceline.comm.ledger.file import NUM_RECORDS, LedgerReader, ledger_path
from paceline.health.ledger_view import DATA, STEP_PHASES, LedgerView, State
from paceline.health.straggler import RankLook
from paceline.run.notes import noted_processes

STILL_S = 0.5  # a rank that has not moved for so long may be in a mismatch
_MOSTLY = 0.5  # of the looks
_MANY_PAGES = 50  # read from a disk in a second
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
STACK_SIGNAL = signal.SIGURG
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$')
_LOOK_S = 0.02
_STEADY_S = 0.2  # on a busy machine a process may rest for so long in the middle of its stacks


class _ProcessSeen:
    """What a rank's process does while the rank stands still."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.halted = ""
        self.halted_s = 0.0
        self._gone_s: float | None = None
        self._still_s = 0.0  # since when it is looked at
        self._num_looks = self._num_blocked = self._page_faults = 0
        self._faults_a_s = 0.0

    def moves(self) -> None:
        self.halted, self._gone_s, self._num_looks = "", None, 0

    def look(self, now: float) -> None:
        found = look_at_process(self.pid) if self._gone_s is None else None
        if found is None:
            self.halted, self._gone_s = "", now if self._gone_s is None else self._gone_s
            return
        if not self._num_looks:
            self._still_s, self._num_blocked, self._page_faults = now, 0, found.page_faults
        self._num_looks += 1
        self._num_blocked += found.is_blocked
        if found.halted != self.halted:
            self.halted, self.halted_s = found.halted, now
        self._faults_a_s = (found.page_faults - self._page_faults) / max(1.0, now - self._still_s)

    def gone_s(self, now: float) -> float:
        return 0.0 if self._gone_s is None else now - self._gone_s

    @property
    def blocked(self) -> str:
        """What the system does for it most of the time; empty where it does nothing special."""
        if not self._num_looks or self._gone_s is not None:
            return ""
        if self._faults_a_s >= _MANY_PAGES:
            return f"its memory is swapped out ({self._faults_a_s:.0f} pages a second come from the disk)"
        if self._num_blocked >= _MOSTLY * self._num_looks:
            return "in a wait that no signal ends (state D): a disk, a file server or a device does not answer"
        return ""


class _RankSeen:
    def __init__(self, reader: LedgerReader, now: float) -> None:
        self.reader = reader
        self.pulse = reader.pulse()
        self.process = _ProcessSeen(reader.pid)
        self.changed_s = now

    def look(self, now: float) -> float:
        """Notes whether anything changed; returns how long it had not, if so."""
        pulse = self.reader.pulse()
        if pulse == self.pulse:
            if now - self.changed_s >= STILL_S:
                self.process.look(now)
            return 0.0
        still_s, self.pulse, self.changed_s = now - self.changed_s, pulse, now
        self.process.moves()
        return still_s

    def view(self, now: float, host: str, dead_s: float) -> LedgerView:
        """Returns what it says and does; a rank that left its ledger open is dead ``dead_s`` after its process."""
        process = self.process
        state: State = "dead" if not self.pulse.is_finished and process.gone_s(now) >= dead_s else "running"
        view = self.reader.view(state=state, changed_s=self.changed_s, host=host)
        return replace(view, halted=process.halted, halted_s=process.halted_s, blocked=process.blocked)


class SeenRanks:
    """The ranks ``numbers`` of this host, with ledgers in ``folder``; one is dead ``dead_s`` after its process."""

    def __init__(self, folder: Path, numbers: Iterable[int], host: str, dead_s: float) -> None:
        self.folder = folder
        self.host = host
        self._dead_s = dead_s
        self._numbers = tuple(numbers)
        self._ranks: dict[int, _RankSeen] = {}
        self._early: dict[int, _ProcessSeen] = {}  # ranks that have no ledger yet
        self._longest_s = 0.0  # that a rank stood still in a step, and went on

    def observe(self, now: float) -> None:
        """Notes which ranks have moved, and what the processes of the others do."""
        self._find_ledgers(now)
        for rank in self._ranks.values():
            was_in_step = rank.pulse.phase in STEP_PHASES and rank.pulse.step > 0
            still_s = rank.look(now)
            if was_in_step:
                self._longest_s = max(self._longest_s, still_s)
        for process in self._early.values():
            process.look(now)

    def views(self, now: float) -> list[LedgerView]:
        """Returns what all ranks say and do; of those without a ledger, the ones that are stopped."""
        found = [rank.view(now, self.host, self._dead_s) for rank in self._ranks.values()]
        for number, process in self._early.items():
            if process.halted:
                since = process.halted_s
                view = LedgerView(rank=number, pid=process.pid, host=self.host, changed_s=since, has_joined=False)
                found.append(replace(view, halted=process.halted, halted_s=since))
        return found

    def rank_looks(self, views: list[LedgerView] | None = None) -> list[RankLook]:
        """Returns what is needed to compare ranks; none before all have been seen, or once one is done."""
        if len(self._ranks) < len(self._numbers) or any(rank.pulse.is_finished for rank in self._ranks.values()):
            return []
        found = views or [rank.reader.view(last=NUM_RECORDS) for rank in self._ranks.values()]
        return [RankLook(view=view, times=self._ranks[view.rank].reader.times()) for view in found]

    def stands_still(self, now: float) -> bool:
        return all(rank.reader.pulse() == rank.pulse and rank.changed_s < now for rank in self._ranks.values())

    def still_s(self, now: float) -> float:
        return min((now - rank.changed_s for rank in self._ranks.values()), default=0.0)

    def readers(self) -> list[LedgerReader]:
        """Returns the ledgers of other processes of this host, as far as they were found."""
        return [rank.reader for rank in list(self._ranks.values()) if rank.reader.pid != os.getpid()]

    def processes(self) -> dict[int, int]:
        early = {number: process.pid for number, process in self._early.items()}
        return early | {number: rank.reader.pid for number, rank in sorted(self._ranks.items())}

    def _find_ledgers(self, now: float) -> None:
        if len(self._ranks) == len(self._numbers):
            return
        noted = noted_processes(self.folder)
        for number in self._numbers:
            if number not in self._ranks:
                reader = LedgerReader.open(ledger_path(self.folder, number))
                if reader is not None:
                    self._ranks[number] = _RankSeen(reader, now)
                    self._early.pop(number, None)
                elif number in noted and number not in self._early:
                    self._early[number] = _ProcessSeen(noted[number])

    def with_lines(self, views: Sequence[LedgerView]) -> list[LedgerView]:
        """Asks ranks at which line they stand, and returns their views with it."""
        # Virtual ranks share a process; one that is stopped cannot answer.
        asked = {view.pid for view in views if view.rank in self._ranks and not view.halted}
        texts = ask_for_stacks((pid, stack_path(self.folder, pid)) for pid in sorted(asked))
        found = []
        for view in views:
            rank = self._ranks.get(view.rank)
            line = "" if rank is None else line_of_thread(texts.get(view.pid, ""), rank.reader.thread)
            if view.phase == DATA and view.waits_in is None:
                line = self._line_of_worker(view) or line
            found.append(replace(view, stands_at=line))
        return found

    def _line_of_worker(self, view: LedgerView) -> str:
        """Returns where a loader worker of a rank stands in the user's code, if one was forked from it."""
        path = stack_path(self.folder, view.pid)
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(view.pid).children():
                state = look_at_process(child.pid)
                if state is not None and state.halted:
                    return f"a loader worker (process {child.pid}) that is {state.halted}"
                texts = ask_for_stacks([(child.pid, path)], patience_s=0.3)
                line = line_of_thread(texts.get(child.pid, ""), -1)
                if line and not line.startswith("paceline/"):
                    return line
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What a process does: what ``halted`` it from outside, if anything; pages read from a disk, so far."""

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


def _ask_psutil(pid: int) -> ProcessState | None:  # on systems without /proc
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


@dataclass(frozen=True, slots=True)
class Frame:
    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{short_name(self.filename)}:{self.line} in {self.function}"


def stack_path(folder: Path, pid: int) -> Path:
    return folder / "health" / f"process-{pid}.stack"


@cache  # virtual ranks ask for the same path
def dump_stacks_into(path: Path) -> None:
    """Lets this process, and those forked from it, write its stacks into ``path`` whenever it gets the signal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Open as long as the handler may write.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)


def ask_for_stacks(asked: Iterable[tuple[int, Path]], *, patience_s: float = 2.0) -> dict[int, str]:
    """Asks processes for their stacks and returns what each wrote within ``patience_s``, by process."""
    places: dict[int, tuple[Path, int]] = {}
    for pid, path in asked:
        before = _size(path)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
            places[pid] = (path, before)
    waiting, deadline = set(places), time.monotonic() + patience_s
    grown = {pid: (before, deadline) for pid, (_, before) in places.items()}  # the last size, and since when
    while waiting and (now := time.monotonic()) < deadline:
        time.sleep(_LOOK_S)
        for pid in list(waiting):
            path, before = places[pid]
            size = _size(path)
            if size != grown[pid][0]:
                grown[pid] = (size, now)
            elif size > before and now - grown[pid][1] >= _STEADY_S:
                waiting.remove(pid)
    return {pid: _read(path, before) for pid, (path, before) in places.items() if _size(path) > before}


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
