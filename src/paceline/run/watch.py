"""Watches ranks from outside: when they stop making progress, says why, and ends them.

A thread looks at the ledgers of the ranks some times a second. What it finds is judged by ``health/verdict.py``; the
ranks are asked where they stand; the verdict goes to ``verdict.json`` and ``verdict.txt`` of the run's folder, to the
log of every rank, and to the failures that the launcher tells; then the ranks are killed.

A look costs microseconds a rank; the operations themselves are read every two seconds, or when a rank stands still.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from paceline.comm.ledger.call_sites import ENGINE, LIBRARY, USER, kind_of_file, short_name
from paceline.comm.ledger.communicator import LedgerCommunicator, ledger_clock
from paceline.comm.ledger.file import NUM_RECORDS, LedgerReader, ledger_path
from paceline.comm.ledger.ledger import Ledger
from paceline.health.failure import Failure, failure_of_verdict, locate_death
from paceline.health.lateness import Lateness, LatenessPolicy, RankLook
from paceline.health.ledger_view import BACKWARD, DATA, FORWARD, OPTIMIZER, LedgerView, State
from paceline.health.straggler import Straggler
from paceline.health.verdict import HangVerdict, Limits, judge
from paceline.run.notes import read_failures, replace_file, write_failure
from paceline.run.records import note_straggler

if TYPE_CHECKING:
    from paceline.comm.base import Communicator
    from paceline.config import Config


# Where another process stands: it writes its stacks into a file when it is asked by a signal.
#
# The handler is faulthandler's: it runs at once, also while the process sits in a C function, and needs no Python to
# run. The signal is SIGURG, which does nothing to a process that knows nothing of this.


STACK_SIGNAL = signal.SIGURG
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$')
_LOOK_S = 0.02


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

    Costs the time until the last has written, or ``patience_s``.
    """
    waiting: dict[int, tuple[Path, int]] = {}
    for pid, path in asked:
        before = _size(path)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
            waiting[pid] = (path, before)
    found: dict[int, str] = {}
    deadline = time.monotonic() + patience_s
    sizes = dict.fromkeys(waiting, -1)
    while waiting and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        for pid, (path, before) in list(waiting.items()):
            size = _size(path)
            if size > before and size == sizes[pid]:  # written, and no more to come
                found[pid] = _read(path, before)
                del waiting[pid]
            sizes[pid] = size
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


_STILL_S = 0.5  # a rank that has not moved for so long may be in a mismatch
_LOOK_AT_ALL_S = 2.0
_DEAD_S = 10.0  # the agent tells of dead ranks itself, and sooner, even on a host that is overrun
_STEP_PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER)
_PATIENT = 3.0  # times the longest standstill that ended by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How long ranks may stand still; see ``Limits``. ``every_s`` is how often they are looked at.

    ``compare_s`` is how often the times of ranks are compared, and ``late`` says when one is told to be late.
    """

    limits: Limits
    every_s: float = 0.2
    compare_s: float = 2.0
    late: LatenessPolicy = field(default_factory=LatenessPolicy)


def watch_policy(config: Config) -> WatchPolicy | None:
    """Returns how the ranks of a config are watched; None where it says not to."""
    if config.monitor.hang_s is None:
        return None
    return WatchPolicy(limits=Limits(step_s=config.monitor.hang_s, setup_s=config.monitor.hang_setup_s))


def keep_ledger(comm: Communicator, folder: Path) -> LedgerCommunicator:
    """Lets a rank keep a ledger, and write its stacks when asked. A communicator that has one is returned as it is."""
    if isinstance(comm, LedgerCommunicator):
        return comm
    rank = comm.ranks[comm.rank]
    dump_stacks_into(stack_path(folder, os.getpid()))
    ledger = Ledger(rank=rank, world=comm.size, path=ledger_path(folder, rank), now=ledger_clock(comm))
    return LedgerCommunicator(comm, ledger)


class _RankSeen:
    def __init__(self, reader: LedgerReader, now: float) -> None:
        self.reader = reader
        self.pulse = reader.pulse()
        self.changed_s = now
        self.gone_s: float | None = None

    def look(self, now: float) -> float:
        """Notes whether anything changed; returns how long it had not, if so."""
        pulse = self.reader.pulse()
        if pulse == self.pulse:
            return 0.0
        still_s, self.pulse, self.changed_s = now - self.changed_s, pulse, now
        return still_s

    def state(self, now: float) -> State:
        """Says whether its process runs; a rank that left its ledger open is dead after a while."""
        if self.pulse.is_finished or psutil.pid_exists(self.reader.pid):
            self.gone_s = None
            return "running"
        self.gone_s = now if self.gone_s is None else self.gone_s
        return "dead" if now - self.gone_s >= _DEAD_S else "running"


class Watch:
    """Looks at the ledgers of some ranks, and finds a verdict at most once."""

    def __init__(self, folder: Path, ranks: Iterable[int], policy: WatchPolicy) -> None:
        self._folder = folder
        self._numbers = tuple(ranks)
        self._policy = policy
        self._ranks: dict[int, _RankSeen] = {}
        self._looked_at_all_s = self._compared_s = 0.0
        self.lateness: Lateness | None = Lateness(policy.late)  # None: somebody else compares, by ``rank_looks``
        self.straggler: Straggler | None = None  # found by the last look
        self._longest_s = 0.0
        self._suspect: HangVerdict | None = None
        self.last_views: list[LedgerView] = []  # with the lines where ranks stand, once there was a verdict
        self._host = socket.gethostname()

    def look(self) -> HangVerdict | None:
        """Looks once. A verdict is found only where two looks agree: a record may have been half written."""
        now = time.monotonic()
        self._find_ledgers(now)
        for rank in self._ranks.values():
            was_in_step = rank.pulse.phase in _STEP_PHASES and rank.pulse.step > 0
            still_s = rank.look(now)
            if was_in_step:
                self._longest_s = max(self._longest_s, still_s)
        is_still = any(now - rank.changed_s >= _STILL_S for rank in self._ranks.values())
        self.straggler = None
        is_due = now - self._compared_s >= self._policy.compare_s
        if not is_still and not is_due and now - self._looked_at_all_s < _LOOK_AT_ALL_S:
            return None
        self._looked_at_all_s = now
        views = self.views(now)
        if is_due:
            self._compared_s = now
            looks = self._looks(views)
            if looks and self.lateness is not None:
                self.straggler = self.lateness.look(looks)
        found = judge(views, now, self._limits())
        suspect, self._suspect = self._suspect, found
        if found is None or suspect is None or suspect.kind != found.kind:
            return None
        return self._with_lines(found, now)

    def views(self, now: float) -> list[LedgerView]:
        return [
            rank.reader.view(state=rank.state(now), changed_s=rank.changed_s, host=self._host)
            for rank in self._ranks.values()
        ]

    def rank_looks(self) -> list[RankLook]:
        """Returns what is needed to compare ranks, with all operations that their ledgers keep; none before all run."""
        return self._looks([rank.reader.view(last=NUM_RECORDS) for rank in self._ranks.values()])

    def stands_still(self, now: float) -> bool:
        """Says whether no rank has made progress since the last look."""
        return all(rank.reader.pulse() == rank.pulse and rank.changed_s < now for rank in self._ranks.values())

    def heartbeats(self) -> dict[int, int]:
        """Returns how often each rank's own watch has looked, where ranks have one."""
        self._find_ledgers(time.monotonic())
        return {number: rank.reader.heartbeat for number, rank in self._ranks.items()}

    def processes(self) -> dict[int, int]:
        return {number: rank.reader.pid for number, rank in sorted(self._ranks.items())}

    def _limits(self) -> Limits:
        """Returns the limits, longer where steps have shown to be long."""
        asked = self._policy.limits
        return Limits(step_s=max(asked.step_s, _PATIENT * self._longest_s), setup_s=asked.setup_s)

    def _looks(self, views: list[LedgerView]) -> list[RankLook]:
        """Returns what is needed to compare ranks; none before all have been seen, or once one is done."""
        if len(views) < len(self._numbers) or any(rank.pulse.is_finished for rank in self._ranks.values()):
            return []
        return [RankLook(view=view, times=self._ranks[view.rank].reader.times()) for view in views]

    def _find_ledgers(self, now: float) -> None:
        for number in self._numbers:
            if number not in self._ranks:
                reader = LedgerReader.open(ledger_path(self._folder, number))
                if reader is not None:
                    self._ranks[number] = _RankSeen(reader, now)

    def _with_lines(self, found: HangVerdict, now: float) -> HangVerdict:
        """Asks the ranks where they stand, and judges again."""
        processes = {rank.reader.pid for rank in self._ranks.values()}  # virtual ranks share one
        texts = ask_for_stacks((pid, stack_path(self._folder, pid)) for pid in sorted(processes))
        views = []
        for view in self.views(now):
            text = texts.get(view.pid, "")
            line = line_of_thread(text, self._ranks[view.rank].reader.thread)
            if view.phase == DATA and view.waits_in is None:
                line = self._line_of_worker(view) or line
            views.append(replace(view, stands_at=line))
        self.last_views = views
        return judge(views, now, self._limits()) or found

    def _line_of_worker(self, view: LedgerView) -> str:
        """Returns where a loader worker of a rank stands in the user's code, if one was forked from it."""
        path = stack_path(self._folder, view.pid)
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(view.pid).children():
                texts = ask_for_stacks([(child.pid, path)], patience_s=0.3)
                line = line_of_thread(texts.get(child.pid, ""), -1)
                if line and not line.startswith("paceline/"):
                    return line
        return ""


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
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join(timeout=patience_s)


@contextlib.contextmanager
def watching(folder: Path, ranks: Iterable[int], policy: WatchPolicy | None) -> Iterator[None]:
    """Watches ranks that this process started while the block runs; without a policy it does not.

    Where they hang, they are killed, and have left a failure with the verdict for their launcher.
    """
    numbers = tuple(ranks)
    forget_health(folder, numbers)
    if policy is None:
        yield
        return
    watch = Watch(folder, numbers, policy)

    def look(is_left: threading.Event) -> bool:
        verdict = watch.look()
        if watch.straggler is not None:
            note_straggler(folder, min(numbers), watch.straggler)
        if verdict is None or is_left.is_set():
            return False
        end_ranks(folder, verdict, watch.processes())
        return True

    with polling(look, every_s=policy.every_s, name="watch", patience_s=10.0):
        yield


def end_ranks(folder: Path, verdict: HangVerdict, processes: Mapping[int, int]) -> None:
    """Writes a verdict to the run's folder, logs and failures, and kills the ranks.

    They are stopped first: none is to fail in its own words because another one is gone.
    """
    own = {os.getpid(), os.getpgrp()}
    groups = {pid for pid in processes.values() if pid not in own}
    _signal(groups, signal.SIGSTOP)
    _tell_and_fail(folder, verdict, processes)
    _signal(groups, signal.SIGKILL)


def tell_verdict(folder: Path, verdict: HangVerdict, ranks: Iterable[int]) -> None:
    """Writes a verdict into the run's folder and into the log of every rank; a disk that is full is left alone."""
    told = {**verdict.to_json(), "time": time.time(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):
        replace_file(folder / "verdict.txt", verdict.to_text())
        replace_file(folder / "verdict.json", json.dumps(told, indent=2) + "\n")
    for rank in ranks:
        with contextlib.suppress(OSError), (folder / "logs" / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
            log.write(f"paceline: {verdict.to_text()}")


def note_mismatch(folder: Path, ranks: Iterable[int]) -> HangVerdict | None:
    """Compares the ledgers of ranks that failed: if they had called different operations, that is the cause."""
    if any(failure.kind == "hang" for failure in read_failures(folder)):
        return None  # it is told already
    readers = {rank: LedgerReader.open(ledger_path(folder, rank)) for rank in ranks}
    now = time.monotonic()
    views = [reader.view(changed_s=now) for reader in readers.values() if reader is not None]
    verdict = judge(views, now, Limits(step_s=math.inf, setup_s=math.inf))  # however long they stood
    if verdict is not None:
        _tell_and_fail(folder, verdict, [view.rank for view in views])
    return verdict


def _tell_and_fail(folder: Path, verdict: HangVerdict, ranks: Collection[int]) -> None:
    """Tells a verdict, which is then the failure of each rank."""
    tell_verdict(folder, verdict, ranks)
    for rank in ranks:
        write_failure(folder, failure_of_verdict(verdict, rank, folder / "verdict.txt"))


def locate_deaths(folder: Path, failures: Iterable[Failure]) -> list[Failure]:
    """Adds to the failures of ranks that were killed or left without a word where they were, as their ledgers say."""
    found = []
    for failure in failures:
        reader = LedgerReader.open(ledger_path(folder, failure.rank)) if failure.cause in ("killed", "died") else None
        if reader is not None:
            failure, verdict = locate_death(failure, reader.view(last=1))
            tell_verdict(folder, verdict, ())
        found.append(failure)
    return found


def forget_health(folder: Path, ranks: Iterable[int]) -> None:
    """Removes what an earlier attempt left: its ledgers and stacks."""
    for path in [*(ledger_path(folder, rank) for rank in ranks), *folder.glob("health/process-*.stack")]:
        path.unlink(missing_ok=True)


def _signal(leaders: Iterable[int], number: int) -> None:
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
