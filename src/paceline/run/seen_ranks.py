"""The ranks of one host, as others see them: by what their ledgers say, and by what the system says of their processes.

A look costs microseconds a rank. ``watch.py`` looks some times a second, from the launcher of the ranks or from inside
one of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from paceline.comm.ledger.file import NUM_RECORDS, LedgerReader, ledger_path
from paceline.health.ledger_view import BACKWARD, DATA, FORWARD, OPTIMIZER, LedgerView, State
from paceline.health.straggler import RankLook
from paceline.run.notes import noted_processes
from paceline.run.process_state import look_at_process
from paceline.run.stacks import ask_for_stacks, line_of_thread, stack_path

STILL_S = 0.5  # a rank that has not moved for so long may be in a mismatch
_DEAD_S = 10.0  # the agent tells of dead ranks itself, and sooner, even on a host that is overrun
_STEP_PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER)
_MOSTLY = 0.5  # of the looks
_MANY_PAGES = 50  # read from a disk in a second


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
            if now - self.changed_s >= STILL_S:
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


class SeenRanks:
    """The ranks ``numbers`` of this host, with ledgers in ``folder``."""

    def __init__(self, folder: Path, numbers: Iterable[int], host: str) -> None:
        self.folder = folder
        self.host = host
        self._numbers = tuple(numbers)
        self._ranks: dict[int, _RankSeen] = {}
        self._early: dict[int, _ProcessSeen] = {}  # ranks that have no ledger yet
        self._longest_s = 0.0  # that a rank stood still in a step, and went on

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
                host=self.host,
                halted=process.halted,
                halted_s=process.halted_s,
                changed_s=process.halted_s,
                has_joined=False,
            )
            for number, process in self._early.items()
            if process.halted
        ]
        return [*(rank.view(now, self.host) for rank in self._ranks.values()), *early]

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
        """Returns the ledgers of other processes of this host, as far as they were found."""
        return [rank.reader for rank in list(self._ranks.values()) if rank.reader.pid != os.getpid()]

    def processes(self) -> dict[int, int]:
        """Returns the process of each rank that is known of."""
        early = {number: process.pid for number, process in self._early.items()}
        return early | {number: rank.reader.pid for number, rank in sorted(self._ranks.items())}

    def _looks(self, views: list[LedgerView]) -> list[RankLook]:
        """Returns what is needed to compare ranks; none before all have been seen, or once one is done."""
        if len(self._ranks) < len(self._numbers) or any(rank.pulse.is_finished for rank in self._ranks.values()):
            return []
        return [RankLook(view=view, times=self._ranks[view.rank].reader.times()) for view in views]

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
