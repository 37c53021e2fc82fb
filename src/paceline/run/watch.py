"""Watches ranks from outside: when they stop making progress, says why, and ends them.

A thread looks at the ledgers of the ranks some times a second. What it finds is judged by ``health/verdict.py``; the
ranks are asked where they stand; the verdict goes to ``verdict.json`` and ``verdict.txt`` of the run's folder, to the
log of every rank, and to the failures that the launcher tells; then the ranks are killed.

A look costs microseconds a rank; the operations themselves are read every two seconds, or when a rank stands still.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from paceline.comm.ledger.communicator import LedgerCommunicator, ledger_clock
from paceline.comm.ledger.file import NUM_RECORDS, LedgerReader, ledger_path
from paceline.comm.ledger.ledger import Ledger
from paceline.health.failure import Failure, failure_of_verdict, locate_death
from paceline.health.lateness import Lateness, LatenessPolicy, RankLook
from paceline.health.ledger_view import BACKWARD, DATA, FORWARD, OPTIMIZER, LedgerView, State
from paceline.health.straggler import Straggler
from paceline.health.verdict import HangLimits, HangVerdict, judge
from paceline.run.logs import append_line
from paceline.run.notes import noted_processes, read_failures, replace_file, write_failure
from paceline.run.polling import polling
from paceline.run.process_state import look_at_process
from paceline.run.records import note_straggler
from paceline.run.stacks import ask_for_stacks, dump_stacks_into, line_of_thread, stack_path

if TYPE_CHECKING:
    from paceline.comm.base import Communicator
    from paceline.config import Config


_STILL_S = 0.5  # a rank that has not moved for so long may be in a mismatch
_LOOK_AT_ALL_S = 2.0
_DEAD_S = 10.0  # the agent tells of dead ranks itself, and sooner, even on a host that is overrun
_STEP_PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER)
_PATIENT = 3.0  # times the longest standstill that ended by itself
_MOSTLY = 0.5  # of the looks
_MANY_PAGES = 50  # read from a disk in a second


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How long ranks may stand still; see ``HangLimits``. ``every_s`` is how often they are looked at.

    ``compare_s`` is how often the times of ranks are compared, and ``late`` says when one is told to be late.
    """

    limits: HangLimits
    every_s: float = 0.2
    compare_s: float = 2.0
    late: LatenessPolicy = field(default_factory=LatenessPolicy)


def watch_policy(config: Config) -> WatchPolicy | None:
    """Returns how the ranks of a config are watched; None where it says not to."""
    if config.monitor.hang_s is None:
        return None
    return WatchPolicy(limits=HangLimits(step_s=config.monitor.hang_s, setup_s=config.monitor.hang_setup_s))


def keep_ledger(comm: Communicator, folder: Path) -> LedgerCommunicator:
    """Lets a rank keep a ledger, and write its stacks when asked. A communicator that has one is returned as it is."""
    if isinstance(comm, LedgerCommunicator):
        return comm
    rank = comm.ranks[comm.rank]
    dump_stacks_into(stack_path(folder, os.getpid()))
    ledger = Ledger(rank=rank, world=comm.size, path=ledger_path(folder, rank), now=ledger_clock(comm))
    return LedgerCommunicator(comm, ledger)


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
        """Notes that the rank has made progress."""
        self.halted, self._gone_s, self._num_looks = "", None, 0

    def look(self, now: float) -> None:
        """Looks at the process, of which nothing else is heard."""
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

    def is_dead(self, now: float) -> bool:
        return self._gone_s is not None and now - self._gone_s >= _DEAD_S

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
            if now - self.changed_s >= _STILL_S:
                self.process.look(now)
            return 0.0
        still_s, self.pulse, self.changed_s = now - self.changed_s, pulse, now
        self.process.moves()
        return still_s

    def view(self, now: float, host: str) -> LedgerView:
        """Returns what it says and does; a rank that left its ledger open and its process is dead after a while."""
        process = self.process
        state: State = "dead" if not self.pulse.is_finished and process.is_dead(now) else "running"
        view = self.reader.view(state=state, changed_s=self.changed_s, host=host)
        return replace(view, halted=process.halted, halted_s=process.halted_s, blocked=process.blocked)


class Watch:
    """Looks at the ledgers of some ranks, and finds a verdict at most once."""

    def __init__(self, folder: Path, ranks: Iterable[int], policy: WatchPolicy) -> None:
        self._folder = folder
        self._numbers = tuple(ranks)
        self._policy = policy
        self._ranks: dict[int, _RankSeen] = {}
        self._early: dict[int, _ProcessSeen] = {}  # ranks that have no ledger yet
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
        self.observe(now)
        is_still = any(now - rank.changed_s >= _STILL_S for rank in self._ranks.values()) or bool(self._early)
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
        limits = self._limits()
        found = judge(views, now, limits)
        suspect, self._suspect = self._suspect, found
        if found is None or suspect is None or suspect.kind != found.kind:
            return None
        # With the limits of before: a rank that gives up while it is asked would make them longer.
        self.last_views = self.with_lines(self.views(now))
        return judge(self.last_views, now, limits) or found

    def observe(self, now: float) -> None:
        """Notes which ranks have moved, and what the processes of the others do."""
        self._find_ledgers(now)
        for rank in self._ranks.values():
            was_in_step = rank.pulse.phase in _STEP_PHASES and rank.pulse.step > 0
            still_s = rank.look(now)
            if was_in_step:
                self._longest_s = max(self._longest_s, still_s)
        for process in self._early.values():
            process.look(now)

    def views(self, now: float) -> list[LedgerView]:
        """Returns what all ranks say and do; of those without a ledger, the ones that are stopped."""
        early = [
            LedgerView(
                rank=number,
                pid=process.pid,
                host=self._host,
                halted=process.halted,
                halted_s=process.halted_s,
                changed_s=process.halted_s,
                has_joined=False,
            )
            for number, process in self._early.items()
            if process.halted
        ]
        return [*(rank.view(now, self._host) for rank in self._ranks.values()), *early]

    def rank_looks(self) -> list[RankLook]:
        """Returns what is needed to compare ranks, with all operations that their ledgers keep; none before all run."""
        return self._looks([rank.reader.view(last=NUM_RECORDS) for rank in self._ranks.values()])

    def stands_still(self, now: float) -> bool:
        """Says whether no rank has made progress since the last look."""
        return all(rank.reader.pulse() == rank.pulse and rank.changed_s < now for rank in self._ranks.values())

    def still_s(self, now: float) -> float:
        """Returns for how long no rank has made progress."""
        return min((now - rank.changed_s for rank in self._ranks.values()), default=0.0)

    def heartbeats(self) -> dict[int, int]:
        """Returns how often each rank's own watch has looked, where ranks have one."""
        self._find_ledgers(time.monotonic())
        return {number: rank.reader.heartbeat for number, rank in self._ranks.items()}

    def readers(self) -> list[LedgerReader]:
        return [rank.reader for rank in list(self._ranks.values())]

    def processes(self) -> dict[int, int]:
        """Returns the process of each rank that is known of."""
        early = {number: process.pid for number, process in self._early.items()}
        return early | {number: rank.reader.pid for number, rank in sorted(self._ranks.items())}

    def _limits(self) -> HangLimits:
        """Returns the limits, longer where steps have shown to be long."""
        asked = self._policy.limits
        step_s = max(asked.step_s, _PATIENT * self._longest_s)
        return replace(asked, step_s=step_s, stopped_s=asked.step_s if asked.stopped_s is None else asked.stopped_s)

    def _looks(self, views: list[LedgerView]) -> list[RankLook]:
        """Returns what is needed to compare ranks; none before all have been seen, or once one is done."""
        if len(self._ranks) < len(self._numbers) or any(rank.pulse.is_finished for rank in self._ranks.values()):
            return []
        return [RankLook(view=view, times=self._ranks[view.rank].reader.times()) for view in views]

    def _find_ledgers(self, now: float) -> None:
        if len(self._ranks) == len(self._numbers):
            return
        noted = noted_processes(self._folder)
        for number in self._numbers:
            if number not in self._ranks:
                reader = LedgerReader.open(ledger_path(self._folder, number))
                if reader is not None:
                    self._ranks[number] = _RankSeen(reader, now)
                    self._early.pop(number, None)
                elif number in noted and number not in self._early:
                    self._early[number] = _ProcessSeen(noted[number])

    def with_lines(self, views: Sequence[LedgerView]) -> list[LedgerView]:
        """Asks ranks at which line they stand, and returns their views with it."""
        # Virtual ranks share a process; one that is stopped cannot answer.
        asked = {view.pid for view in views if view.rank in self._ranks and not view.halted}
        texts = ask_for_stacks((pid, stack_path(self._folder, pid)) for pid in sorted(asked))
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
        path = stack_path(self._folder, view.pid)
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


@contextlib.contextmanager
def watching(folder: Path, ranks: Iterable[int], policy: WatchPolicy | None) -> Iterator[None]:
    """Watches ranks that this process started while the block runs; without a policy it does not.

    Where they hang, they are killed, and have left a failure with the verdict for their launcher.
    """
    numbers = tuple(ranks)
    if policy is None:
        yield
        return
    watch = Watch(folder, numbers, policy)

    def look(is_left: threading.Event) -> bool:
        verdict = None
        with contextlib.suppress(OSError):  # no file can be opened now: the next look may
            verdict = watch.look()
        if watch.straggler is not None:
            note_straggler(folder, min(numbers), watch.straggler)
        if verdict is None or is_left.is_set():
            return False
        end_ranks(folder, verdict, watch.processes())
        return True

    with polling(look, every_s=policy.every_s, name="watch", patience_s=10.0):
        yield


def end_ranks(folder: Path, verdict: HangVerdict, processes: Mapping[int, int], *, is_told: bool = False) -> None:
    """Writes a verdict to the run's folder and logs, if it is not told yet, and to failures; kills the ranks.

    They are stopped first: none is to fail in its own words because another one is gone.
    """
    own = {os.getpid(), os.getpgrp()}
    groups = {pid for pid in processes.values() if pid not in own}
    _signal(groups, signal.SIGSTOP)
    if not is_told:
        tell_verdict(folder, verdict, processes)
    _fail(folder, verdict, processes)
    _signal(groups, signal.SIGKILL)


def tell_verdict(folder: Path, verdict: HangVerdict, ranks: Iterable[int]) -> None:
    """Writes a verdict into the run's folder, its log, and the log of every rank; a disk that is full is left alone."""
    told = {**verdict.to_json(), "time": time.time(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):
        replace_file(folder / "verdict.txt", verdict.to_text())
        replace_file(folder / "verdict.json", json.dumps(told, indent=2) + "\n")
    for name in ("run", *(f"rank-{rank}" for rank in ranks)):
        append_line(folder / "logs" / f"{name}.log", "watch", logging.ERROR, verdict.to_text().rstrip())


def note_mismatch(folder: Path, ranks: Iterable[int]) -> HangVerdict | None:
    """Compares the ledgers of ranks that failed: if they had called different operations, that is the cause."""
    if any(failure.kind == "hang" for failure in read_failures(folder)):
        return None  # it is told already
    readers = {rank: LedgerReader.open(ledger_path(folder, rank)) for rank in ranks}
    now = time.monotonic()
    views = [reader.view(changed_s=now) for reader in readers.values() if reader is not None]
    verdict = judge(views, now, HangLimits(step_s=math.inf, setup_s=math.inf))  # however long they stood
    if verdict is not None:
        ranks = [view.rank for view in views]
        tell_verdict(folder, verdict, ranks)
        _fail(folder, verdict, ranks)
    return verdict


def _fail(folder: Path, verdict: HangVerdict, ranks: Collection[int]) -> None:
    """Makes a verdict the failure of each rank."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # the ranks must be ended all the same
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


def _signal(leaders: Iterable[int], number: int) -> None:
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
