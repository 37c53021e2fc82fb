"""The watch: when ranks stop making progress, it says why, and ends them.

A thread looks at the ledgers of a host's ranks some times a second, and at all operations every two seconds, or when a
rank stands still. What it finds is judged by ``health/verdict.py``; the verdict is told (``notes.py``), and the ranks
are killed. It runs in the launcher of ``paceline train``, on each host; and in every rank of another launcher, and of
loops of one's own. There the lowest rank of a host whose thread still runs leads. Hosts tell one another what their
ranks do through a store, only when all of a host stand still (``other_hosts.py``); the first verdict is everybody's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.comm.base import Communicator
from paceline.comm.control.store import TIMEOUT_S, SideChannel
from paceline.comm.ledger.file import HEARTBEAT, ledger_path
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.meeting import join_store
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.comm.traced import LedgerCommunicator, ledger_clock
from paceline.config import Config
from paceline.errors import CommunicationError
from paceline.health.exit_codes import HUNG
from paceline.health.ledger_view import LedgerView, views_from_text, views_to_text
from paceline.health.straggler import Lateness, LatenessPolicy, Straggler
from paceline.health.verdict import AT_ONCE, HangLimits, HangVerdict, RankState, judge, state_of
from paceline.run.notes import end_ranks, tell_verdict
from paceline.run.other_hosts import LateHosts, LeftRanks, PairedHosts, left_key
from paceline.run.processes import end_children, tell_agent
from paceline.run.records import append_event
from paceline.run.seen_ranks import STILL_S, SeenRanks, dump_stacks_into, stack_path
from paceline.run.signals import start_thread
from paceline.run.whereami import host_name
from paceline.search.expectation import read_expectation

_LOOK_AT_ALL_S = 2.0
_DEAD_S = 10.0  # a launcher tells of its dead ranks itself, and sooner, even on a host that is overrun
_DEAD_CHILD_S = 60.0  # the agent beside this watch knows by which signal: it is ending the other ranks
_PATIENT = 3.0  # times the longest standstill that ended by itself
_BEAT_S = 2.5  # a thread that has not run for so long does not lead
_ASK_S = 0.02
_ANSWER_S, _LONGEST_ANSWER_S = 1.5, 10.0  # a host that lives answers within this
_TAKES_OVER_S = 1.2  # until the next rank of a host leads, and has answered
_UNHEARD = "its host is gone, stopped or cannot be reached"
_STOPS_S = 10.0  # a look takes less, even where ranks are asked for their stacks
_HOSTS_PERIODS = 5  # hosts compare times more seldom than ranks of one host


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How long ranks may stand still, how often they are looked at and compared, and when one is told to be late."""

    limits: HangLimits
    every_s: float = 0.2
    compare_s: float = 2.0
    late: LatenessPolicy = field(default_factory=LatenessPolicy)


def watch_policy(config: Config) -> WatchPolicy | None:
    if config.monitor.hang_s is None:
        return None
    return WatchPolicy(limits=HangLimits(step_s=config.monitor.hang_s, setup_s=config.monitor.hang_setup_s))


def keep_ledger(comm: Communicator, folder: Path) -> LedgerCommunicator:
    """Lets a rank keep a ledger, and write its stacks when asked. A communicator that has one is returned as it is."""
    return comm if isinstance(comm, LedgerCommunicator) else LedgerCommunicator(comm, make_ledger(comm, folder))


def make_ledger(comm: Communicator, folder: Path, *, is_own_loop: bool = False) -> Ledger:
    """Makes the ledger of a rank, who writes its stacks beside it when asked."""
    rank, now = comm.ranks[comm.rank], ledger_clock(comm)
    dump_stacks_into(stack_path(folder, os.getpid()))
    return Ledger(rank=rank, world=comm.size, path=ledger_path(folder, rank), now=now, is_own_loop=is_own_loop)


def watch_itself(comm: Communicator, folder: Path, policy: WatchPolicy | None) -> LedgerCommunicator:
    """Lets ranks keep a ledger and, with a policy, watch themselves, in a thread of each; all ranks call it."""
    comm = keep_ledger(comm, folder)
    if policy is not None and comm.size > 1:
        start_watch(comm, folder, policy)
    return comm


def start_watch(comm: LedgerCommunicator, folder: Path, policy: WatchPolicy, *, told: Path | None = None) -> Watch:
    """Starts the thread of a rank that watches those of its host, with ledgers in ``folder``; all ranks call it."""
    own = host_name()
    hosts: dict[str, list[int]] = {}
    for rank, name in zip(comm.ranks, gather_objects(comm, own), strict=True):
        hosts.setdefault(name, []).append(rank)
    run = broadcast_object(comm, f"{time.time_ns()}")
    channel = None
    if len(hosts) > 1:
        channel = SideChannel(join_store(TIMEOUT_S), run, farewell=left_key(0))
    watch = Watch(folder, hosts, policy, host=own, channel=channel, ledger=comm.ledger, told=told)
    watch.observe(time.monotonic())  # all ledgers are there by now, and steps may be fast
    watch.start()
    return watch


class Watch(SeenRanks):
    """Watches the ranks of this host, and exchanges verdicts with other hosts.

    ``hosts`` are the ranks of every host by its name, ``host`` this one's; ``named`` is what it is called, where they
    have numbers. ``ledger`` is that of the rank which watches; None: a launcher does. Verdicts go into ``told``, or
    ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Mapping[str, Sequence[int]],
        policy: WatchPolicy,
        *,
        host: str,
        channel: SideChannel | None = None,
        ledger: Ledger | None = None,
        named: str = "",
        told: Path | None = None,
    ) -> None:
        super().__init__(folder, hosts[host], host, _DEAD_S if ledger is not None else _DEAD_CHILD_S)
        self.hosts, self.channel, self.told = hosts, channel, told
        self.paired: PairedHosts | None = None  # in a loop of the user's own, on the first rank of one of several hosts
        self.left: LeftRanks | None = None  # in a loop of the user's own, on several hosts
        self._policy, self._ledger = policy, ledger
        self._own = None if ledger is None else ledger.reader()
        self._names = {host: named} if named else {each: each for each in hosts}
        self._suspect: HangVerdict | None = None
        self._last_views: list[LedgerView] = []  # with the lines where ranks stand, once there was a verdict
        self._looked_at_all_s = self._compared_s = 0.0
        self._lateness = Lateness(policy.late)
        self._late_hosts: LateHosts | None = None
        if channel is not None:
            period_s = _HOSTS_PERIODS * policy.compare_s
            self._late_hosts = LateHosts(channel, host, tuple(hosts), self.rank_looks, self._lateness, period_s)
        self._beats: dict[int, tuple[int, float]] = {}
        self._leads_now = ledger is None
        self._published_s: float | None = None
        self._heard: dict[str, tuple[str, float]] = {}  # what hosts answered last, and when
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the threads of this watch, which must not be inside torch when the interpreter ends. Safe twice."""
        if self.channel is not None:
            self.channel.close()
        self.end_thread()
        atexit.unregister(self.stop)

    def leave(self) -> None:
        """Stops, and says to other hosts that this rank has left its loop as it should."""
        self.end_thread()
        if self.left is not None and self._own is not None:
            now = time.monotonic()
            self.left.leave(self._own.view(changed_s=now, host=self.host), now)
        self.stop()

    def end_thread(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_STOPS_S)

    def _follow(self) -> None:
        """Looks at the ledgers until there is a verdict, which ends the ranks."""
        if self.channel is not None:
            with contextlib.suppress(CommunicationError):
                self.channel.publish(f"name/{self.host}", self._names[self.host])
        ahead_s = None  # of the clock, until it is in the records
        if self._late_hosts is not None and (self._own is None or self._own.rank == self.hosts[self.host][0]):
            ahead_s = self._late_hosts.compare_clocks()
        while not (self._own is not None and self._own.pulse().is_finished):
            if self._is_over.wait(self._policy.every_s):
                return
            if self._ledger is not None:
                self._ledger.cells[HEARTBEAT] += 1
            # The store went with its owner: the launcher will tell. Files: the next look may open them.
            with contextlib.suppress(CommunicationError, OSError):
                if ahead_s is not None and self.told is None:  # a loop of the user's own has no records
                    ranks = list(self.hosts[self.host])
                    clock = {"ahead_s": round(ahead_s, 6), "ranks": ranks}  # lays steps of hosts beside one another
                    has_begun = any(rank.pulse.step > 0 for rank in self._ranks.values())
                    if has_begun and append_event(self.folder, ranks[0], "clock", clock):
                        ahead_s = None
                verdict = self.look()
                if verdict is not None and not self._is_over.is_set():
                    self._end(verdict)
                    return
                late = None if self._late_hosts is None or not self._leads_now else self._late_hosts.look()
                if late is not None:
                    self._tell_late(late)

    def look(self) -> HangVerdict | None:
        """Looks once at the ledgers; of several threads on a host only the leader does."""
        now = time.monotonic()
        self._leads_now = self._own is None or self._leads(now, self._own.rank)
        if not self._leads_now:
            self.observe(now)  # it may lead soon, and then knows since when ranks stand still
            return None
        is_told = self._published_s is not None and self.stands_still(now)
        found = None if is_told else self._look_here(now)
        if self.channel is None:
            return found
        try:
            if self.left is not None:
                self.left.look(now)
                if self.left.is_store_gone:
                    self._late_hosts = None
                    return None if found is None else self.left.explain(self._last_views, now)
            if found is None and self.paired is not None:
                found = self.paired.look(now)
                found = None if found is None else replace(found, states=tuple(self.states()))
            return self._with_others(self.channel, found, now)
        except CommunicationError:
            if found is None and not is_told:
                return None
            first = next(iter(self.hosts))  # which has the store
            hosts = [first] if first != self.host else [host for host in self.hosts if host != self.host]
            return self._without(hosts, f"nothing is heard of {self._name(hosts)}: {_UNHEARD}")

    def _look_here(self, now: float) -> HangVerdict | None:
        """Judges the ranks of this host. A verdict needs two looks that agree: a record may have been half written."""
        self.observe(now)
        is_still = any(now - rank.changed_s >= STILL_S for rank in self._ranks.values()) or bool(self._early)
        is_due = now - self._compared_s >= self._policy.compare_s
        if not is_still and not is_due and now - self._looked_at_all_s < _LOOK_AT_ALL_S:
            return None
        self._looked_at_all_s = now
        views = self.views(now)
        if is_due:
            self._compared_s = now
            looks = self.rank_looks(views) if self._late_hosts is None else []
            late = self._lateness.look(looks) if looks else None
            if late is not None:
                self._tell_late(late)
        limits = self._limits()
        found = judge(views, now, limits)
        suspect, self._suspect = self._suspect, found
        if found is None or suspect is None or suspect.kind != found.kind:
            return None
        # With the limits of before: a rank that gives up while it is asked would make them longer.
        self._last_views = self.with_lines(self.views(now))
        return judge(self._last_views, now, limits) or found

    def _limits(self) -> HangLimits:
        """Returns the limits of the config; longer where steps have shown to be long, or were predicted to be."""
        asked, expected = self._policy.limits, read_expectation(self.folder)
        longest_s = max(self._longest_s, (expected and expected.step_s) or 0.0)
        stopped_s = asked.step_s if asked.stopped_s is None else asked.stopped_s
        return replace(asked, step_s=max(asked.step_s, _PATIENT * longest_s), stopped_s=stopped_s)

    def states(self) -> list[RankState]:
        now = time.monotonic()
        self.observe(now)
        return [state_of(view, now) for view in sorted(self.views(now), key=lambda view: view.rank)]

    def _leads(self, now: float, own: int) -> bool:
        self._find_ledgers(now)
        for rank, seen in self._ranks.items():
            before, since_s = self._beats.get(rank, (-1, now))
            beat = seen.reader.heartbeat  # how often its own watch has looked
            self._beats[rank] = (beat, now if beat != before else since_s)
        lower = (since_s for rank, (_, since_s) in self._beats.items() if rank < own)
        return all(now - since_s >= _BEAT_S for since_s in lower)

    def tell(self, verdict: HangVerdict) -> None:
        """Writes a verdict where it is looked for, a rank also to standard error; in an own loop, the first counts."""
        where = self.folder if self.told is None else self.told
        if self.told is not None and (where / "verdict.txt").exists():
            return
        where.mkdir(parents=True, exist_ok=True)
        tell_verdict(where, verdict, () if self.told is not None else self.processes())
        self._print(f"{verdict.sentence}\n  what every rank does is in {where / 'verdict.txt'}")

    def _tell_late(self, found: Straggler) -> None:
        append_event(self.folder, self.hosts[self.host][0], "straggler", found.to_json())
        self._print(str(found))

    def _print(self, text: str) -> None:
        if self._ledger is not None:  # else the launcher tells it
            sys.stderr.write(f"paceline: {text}\n")
            sys.stderr.flush()

    def _end(self, verdict: HangVerdict) -> None:
        """Ends the ranks of this host; one that watches leaves with the code that says why."""
        with contextlib.suppress(OSError):  # of a disk that is full
            self.tell(verdict)
        if self.channel is not None:  # every host must have the verdict: the store may be a rank's, and ends with it
            deadline = time.monotonic() + _ANSWER_S
            with contextlib.suppress(CommunicationError):
                self.channel.publish(f"has/{self.host}", "it")
                while time.monotonic() < deadline and not all(self.channel.read(f"has/{host}") for host in self.hosts):
                    time.sleep(_ASK_S)
        end_ranks(self.folder, verdict, self.processes())
        if self._ledger is not None:
            tell_agent(verdict.sentence, verdict.to_text(), time.time())
            end_children()
            os._exit(HUNG)  # without a flush of standard output, for which a rank that hangs may hold the lock

    def _with_others(self, channel: SideChannel, found: HangVerdict | None, now: float) -> HangVerdict | None:
        """Tells other hosts that this one makes no progress, and judges when none does."""
        for host in self.hosts.keys() - self._names.keys():
            if name := channel.read(f"name/{host}"):
                self._names[host] = name
        told = channel.read("verdict")
        if told:
            return HangVerdict.from_json(json.loads(told))
        if found is not None and found.kind in ("mismatch", "stopped"):
            channel.publish("verdict", json.dumps(found.to_json()))
            return found
        if found is None:
            if self._published_s is not None and not self.stands_still(now):
                channel.publish(f"host/{self.host}", "")
                self._published_s = None
            if self._published_s is None:
                if channel.read("asked"):
                    channel.publish(f"lives/{self.host}", repr(now))
                self._ask_others(channel, now)
                return None
        elif self._published_s is None:
            self._published_s = now
            channel.publish(f"host/{self.host}", views_to_text(self._last_views, now))
        self._ask_others(channel, now)
        views: dict[str, list[LedgerView]] = {}  # of hosts whose ranks stand still or have left
        for host in self.hosts:
            text = channel.read(f"host/{host}")
            has_left = not text and self.left is not None and host != self.host
            views[host] = self.left.of_host(host, now) if has_left and self.left else views_from_text(text or "[]", now)
        silent = [host for host, found_there in views.items() if not found_there]
        verdict = None
        if not silent:
            verdict = judge([view for each in views.values() for view in each], now, AT_ONCE)
        else:
            limit_s = self._policy.limits.step_s
            patience_s = max(_ANSWER_S, min(_LONGEST_ANSWER_S, limit_s / 4))
            is_late = self.still_s(now) > _BEAT_S + _TAKES_OVER_S  # else another rank there may answer soon
            mute = [host for host in silent if is_late and now - self._heard[host][1] > patience_s]
            if mute:
                why = f"{_UNHEARD}, or no rank there lets its Python run"
                verdict = self._without(mute, f"nothing is heard of {self._name(mute)}: {why}")
            elif self._published_s is not None and now - self._published_s > limit_s + 2 * _BEAT_S:
                verdict = self._without(silent, f"the ranks of {self._name(silent)} move, and do not come")
        if verdict is not None:
            channel.publish("verdict", json.dumps(verdict.to_json()))
        return verdict

    def _ask_others(self, channel: SideChannel, now: float) -> None:
        """Asks other hosts whether they live, once this one has stood still for half of the limit."""
        if self.still_s(now) < self._policy.limits.step_s / 2:
            if self._heard:
                channel.publish("asked", "")
            self._heard = {}
            return
        channel.publish("asked", "do you live?")
        for host in self.hosts:
            text = channel.read(f"lives/{host}") if host != self.host else ""
            before, since_s = self._heard.get(host, (text, now))
            self._heard[host] = (text, now if text != before else since_s)

    def _name(self, hosts: list[str]) -> str:
        ranks = {self._names.get(host, f"host {host}"): ", ".join(map(str, self.hosts[host])) for host in hosts}
        return ", ".join(f"{host} (rank{'' if each.isdecimal() else 's'} {each})" for host, each in ranks.items())

    def _without(self, hosts: list[str], why: str) -> HangVerdict:
        """Blames the ranks of other hosts, with what those of this one wait in."""
        states = tuple(self.states())
        own = "; ".join(f"rank {state.rank} {state.does}" for state in states)
        ranks = sorted(rank for host in hosts for rank in self.hosts[host])
        sentence = f"the ranks of {self._names[self.host]} stand still, and {why}; {own}"
        return HangVerdict(kind="missing", ranks=tuple(ranks), sentence=sentence, states=states)
