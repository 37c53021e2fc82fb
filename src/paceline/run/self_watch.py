"""A watch inside the ranks, for those that somebody else started (torchrun, Slurm) and for loops of one's own.

    comm = paceline.connect()          # see own_loop.py

Every rank has a thread that watches the ledgers of its host. One of a host's threads leads: that of the lowest rank
whose thread still runs, as a rank that never lets go of its interpreter has none. Hosts tell one another what their
ranks do through the store at which the ranks met, and only when all ranks of a host stand still; loops of one's own
compare their steps there too (``pair_hosts.py``). The first verdict is everybody's. The leader of each host ends the
host's ranks, and leaves with ``exit_codes.HUNG``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.comm.ledger.communicator import LedgerCommunicator
from paceline.comm.ledger.file import HEARTBEAT, LedgerReader
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.meeting import join_store
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.comm.side_channel import TIMEOUT_S, SideChannel
from paceline.errors import CommunicationError
from paceline.health.exit_codes import HUNG
from paceline.health.lateness import Lateness, RankLook
from paceline.health.ledger_text import looks_from_text, looks_to_text, views_from_text, views_to_text
from paceline.health.ledger_view import LedgerView
from paceline.health.straggler import Straggler
from paceline.health.verdict import HangLimits, HangVerdict, RankState, judge, state_of
from paceline.run.left_ranks import LeftRanks, left_key
from paceline.run.nodes import HOST
from paceline.run.pair_hosts import PairedHosts
from paceline.run.rank_process import end_children, tell_agent
from paceline.run.records import note_clock, note_straggler
from paceline.run.watch import Watch, WatchPolicy, end_ranks, keep_ledger, tell_verdict

if TYPE_CHECKING:
    from paceline.comm.base import Communicator


# Which rank is late where ranks are on several hosts: every host leaves its times at the store, and one compares.
#
#     every period      each host leaves the last operations before a common moment, and what its steps took
#     half a period on  the host of rank 0 reads what all left, and compares (``health/lateness.py``)
#
# The moments are common because clocks are compared at the start, by texts to and fro through the store: of some
# rounds the fastest counts, as half of it is what may be wrong. From then on the hosts' time services keep them. A
# text has some kilobytes. No rank waits for any of it: it is done in a thread of one rank a host.


_ROUNDS = 5
_LAST = 16  # operations of a rank that are compared

TakeLooks = Callable[[], list[RankLook]]


def clock_ahead(
    channel: SideChannel, host: str, hosts: Sequence[str], now: Callable[[], float] = time.time
) -> float | None:
    """Returns how far this host's time of day is ahead of the first one's; None where they could not be compared.

    One thread of every host calls it, at about the same time. Costs ``2 x rounds`` texts a host, one after the other.
    """
    first, *others = hosts
    best = (math.inf, 0.0)
    try:
        if host == first:
            for name in [f"clock/{other}/{number}" for other in others for number in range(_ROUNDS)]:
                channel.wait_for(f"{name}/asked")
                channel.publish(f"{name}/told", repr(now()))
            return 0.0
        for number in range(_ROUNDS):
            start = now()
            channel.publish(f"clock/{host}/{number}/asked", "what time is it")
            told = float(channel.wait_for(f"clock/{host}/{number}/told"))
            end = now()
            best = min(best, (end - start, (start + end) / 2 - told))
    except CommunicationError:
        return None
    round_trip_s, ahead_s = best
    return ahead_s if abs(ahead_s) > round_trip_s / 2 else 0.0  # less than what may be wrong says nothing


@dataclass(slots=True)
class LateHosts:
    """Publishes the times of one host's ranks; on the host of rank 0, compares those of all hosts.

    ``hosts`` begins with that of rank 0; ``take`` returns what the ledgers of this host's ranks hold.
    """

    channel: SideChannel
    host: str
    hosts: Sequence[str]
    take: TakeLooks
    lateness: Lateness
    period_s: float
    now: Callable[[], float] = time.time
    _ahead_s: float | None = None
    _moment: float = 0.0
    _own: str = ""
    _is_compared: bool = True

    def compare_clocks(self) -> float | None:
        """Finds out how far this host's clock is ahead; None where that could not be found."""
        self._ahead_s = clock_ahead(self.channel, self.host, self.hosts, self.now)
        return self._ahead_s

    def look(self) -> Straggler | None:
        """Publishes or compares when a period is over. Raises CommunicationError when the store is gone."""
        now = self.now() - (self._ahead_s or 0.0)
        moment = now // self.period_s * self.period_s
        if moment != self._moment:
            self._moment, self._is_compared = moment, False
            self._own = json.dumps([moment, looks_to_text(self._looks(now, moment))])
            if self.host != self.hosts[0]:
                self.channel.publish(f"times/{self.host}", self._own)
        if self.host != self.hosts[0] or self._is_compared or now < moment + self.period_s / 2:
            return None
        self._is_compared = True
        texts = [self._own, *(self.channel.read(f"times/{host}") for host in self.hosts[1:])]
        found = [json.loads(text) for text in texts if text]
        if len(found) < len(self.hosts) or any(each[0] != moment or not each[1] for each in found):
            return None
        return self.lateness.look([look for _, text in found for look in looks_from_text(text)])

    def _looks(self, now: float, moment: float) -> list[RankLook]:
        """Returns this host's ranks with their last operations before ``moment``."""
        if self._ahead_s is None:
            looks = self.take()
            return [replace(look, view=replace(look.view, entries=()), ahead_s=None) for look in looks]
        ahead_s = time.perf_counter() - now  # of the clock that ledgers are written by
        kept = []
        for look in self.take():
            entries = [entry for entry in look.view.entries if entry.issued_s - ahead_s <= moment]
            view = replace(look.view, entries=tuple(entries[-_LAST:]), host=self.host)
            kept.append(replace(look, view=view, ahead_s=ahead_s))
        return kept


_BEAT_S = 2.5  # a thread that has not run for so long does not lead
_ASK_S = 0.02
_ANSWER_S, _LONGEST_ANSWER_S = 1.5, 10.0  # a host that lives answers within this
_TAKES_OVER_S = 1.2  # until the next rank of a host leads, and has answered
_UNHEARD = "its host is gone, stopped or cannot be reached"
_STOPS_S = 3.0  # a look takes less, even where ranks are asked for their stacks
_HOSTS_PERIODS = 5  # hosts compare times more seldom than ranks of one host
_NO_LIMIT = HangLimits(step_s=0.0, setup_s=0.0)


def watch_itself(
    comm: Communicator, folder: Path, policy: WatchPolicy | None, *, host: str | None = None
) -> LedgerCommunicator:
    """Lets ranks keep a ledger and watch themselves, in a thread of each; all ranks call it.

    Without a policy they only keep the ledger. ``host`` is this host's name.
    """
    comm = keep_ledger(comm, folder)
    if policy is not None and comm.size > 1:
        start_watch(comm, folder, policy, host=host)
    return comm


def start_watch(
    comm: LedgerCommunicator, folder: Path, policy: WatchPolicy, *, host: str | None = None, told: Path | None = None
) -> SelfWatch:
    """Starts the thread of a rank that watches those of its host, with ledgers in ``folder``; all ranks call it.

    The verdict goes into the folder ``told``, if that is another one.
    """
    own = host or os.environ.get(HOST) or socket.gethostname()
    hosts: dict[str, list[int]] = {}
    for rank, name in zip(comm.ranks, gather_objects(comm, own), strict=True):
        hosts.setdefault(name, []).append(rank)
    run = broadcast_object(comm, f"{time.time_ns()}")
    channel = None
    if len(hosts) > 1:
        channel = SideChannel(join_store(TIMEOUT_S), run, farewell=left_key(0))
    watch = SelfWatch(folder, comm.ledger, hosts, policy, channel, own, told)
    watch.views(time.monotonic())  # all ledgers are there by now, and steps may be fast
    watch.start()
    return watch


@dataclass(slots=True)
class SelfWatch:
    """Watches the ranks of this host from inside one of them, and exchanges verdicts with other hosts.

    ``hosts`` are the ranks of every host by its name; ``host`` is this one's.
    """

    folder: Path
    ledger: Ledger
    hosts: Mapping[str, list[int]]
    policy: WatchPolicy
    channel: SideChannel | None
    host: str
    told: Path | None = None  # where the verdict goes; None: into ``folder``
    paired: PairedHosts | None = None  # in a loop of the user's own, on the first rank of one of several hosts
    left: LeftRanks | None = None  # in a loop of the user's own, on several hosts
    _watch: Watch = field(init=False)
    _late_hosts: LateHosts | None = None
    _beats: dict[int, tuple[int, float]] = field(default_factory=dict)
    _leads_now: bool = False
    _published_s: float | None = None
    _heard: dict[str, tuple[str, float]] = field(default_factory=dict)  # what hosts answered last, and when
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._watch = Watch(self.folder, self.hosts[self.host], self.policy)
        if self.channel is not None:
            self._watch.lateness = None
            take, lateness = self._watch.rank_looks, Lateness(self.policy.late)
            period_s = _HOSTS_PERIODS * self.policy.compare_s
            self._late_hosts = LateHosts(self.channel, self.host, tuple(self.hosts), take, lateness, period_s)

    def start(self) -> None:
        """Starts the thread that follows the ranks until this process ends."""
        self._thread = threading.Thread(target=self.follow, name="watch", daemon=True)
        self._thread.start()
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
        if self.left is not None:
            now = time.monotonic()
            self.left.leave(self.ledger.reader().view(changed_s=now, host=self.host), now)
        self.stop()

    def end_thread(self) -> None:
        """Stops to look at the ledgers."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_STOPS_S)

    def follow(self) -> None:
        """Looks at the ledgers until there is a verdict, which ends this process."""
        ahead_s = None  # of the clock, until it is in the records
        if self._late_hosts is not None and self.ledger.reader().rank == self.hosts[self.host][0]:
            ahead_s = self._late_hosts.compare_clocks()
        while not self.ledger.reader().pulse().is_finished and not self._is_over.wait(self.policy.every_s):
            self.ledger.cells[HEARTBEAT] += 1
            # The store went with its owner: the launcher will tell. Files: the next look may open them.
            with contextlib.suppress(CommunicationError, OSError):
                if ahead_s is not None and self._has_noted_clock(ahead_s):
                    ahead_s = None
                verdict = self.look()
                if verdict is not None:
                    self._leave(verdict)
                late = None if self._late_hosts is None or not self._leads_now else self._late_hosts.look()
                if late is not None:
                    self._tell_late(late)

    def _has_noted_clock(self, ahead_s: float) -> bool:
        """Writes how far this host's clock is ahead behind the first step of this attempt; says when that is done."""
        if self.told is not None:  # a loop of the user's own has no records
            return True
        has_begun = self.ledger.reader().pulse().step > 0
        return has_begun and note_clock(self.folder, self.hosts[self.host], ahead_s)

    def look(self) -> HangVerdict | None:
        """Looks once at the ledgers; only the leader of a host does."""
        now = time.monotonic()
        self._leads_now = self._leads(now)
        if not self._leads_now:
            self._watch.observe(now)  # it may lead soon, and then knows since when ranks stand still
            return None
        is_told = self._published_s is not None and self._watch.stands_still(now)
        found = None if is_told else self._watch.look()
        if self._watch.straggler is not None:
            self._tell_late(self._watch.straggler)
        if self.channel is None:
            return found
        try:
            if self.left is not None:
                self.left.look(now)
                if self.left.is_store_gone:
                    self._late_hosts = None
                    return None if found is None else self.left.explain(self._watch.last_views, now)
            if found is None and self.paired is not None:
                found = self.paired.look(now)
                found = None if found is None else replace(found, states=tuple(self.states()))
            return self._with_others(self.channel, found, now)
        except CommunicationError:
            return self._cut_off() if found is not None or is_told else None

    def readers(self) -> list[LedgerReader]:
        """Returns the ledgers of the other ranks of this host, as far as they were found."""
        return [reader for reader in self._watch.readers() if reader.pid != os.getpid()]

    def views(self, now: float) -> list[LedgerView]:
        """Returns what the ranks of this host say and do."""
        self._watch.observe(now)
        return self._watch.views(now)

    def with_lines(self, views: Sequence[LedgerView]) -> list[LedgerView]:
        """Asks other processes of this host at which line they stand, and returns all views."""
        others = self._watch.with_lines([view for view in views if view.pid != os.getpid()])
        lines = {view.rank: view for view in others}
        return [lines.get(view.rank, view) for view in views]

    def states(self) -> list[RankState]:
        """Returns what the ranks of this host do, for the details of a verdict."""
        now = time.monotonic()
        return [state_of(view, now) for view in sorted(self.views(now), key=lambda view: view.rank)]

    def tell(self, verdict: HangVerdict) -> None:
        """Writes a verdict where it is looked for, and to standard error; in an own loop, the first one counts."""
        where = self.folder if self.told is None else self.told
        if self.told is not None and (where / "verdict.txt").exists():
            return
        where.mkdir(parents=True, exist_ok=True)
        tell_verdict(where, verdict, () if self.told is not None else self.hosts[self.host])
        sys.stderr.write(f"paceline: {verdict.sentence}\n  what every rank does is in {where / 'verdict.txt'}\n")
        sys.stderr.flush()

    def _tell_late(self, found: Straggler) -> None:
        note_straggler(self.folder, self.hosts[self.host][0], found)
        sys.stderr.write(f"paceline: {found}\n")
        sys.stderr.flush()

    def _leads(self, now: float) -> bool:
        """Says whether the watches of all lower ranks on this host have stopped."""
        for rank, beat in self._watch.heartbeats().items():
            before, since_s = self._beats.get(rank, (-1, now))
            self._beats[rank] = (beat, now if beat != before else since_s)
        own = self.ledger.reader().rank
        lower = (since_s for rank, (_, since_s) in self._beats.items() if rank < own)
        return all(now - since_s >= _BEAT_S for since_s in lower)

    def _with_others(self, channel: SideChannel, found: HangVerdict | None, now: float) -> HangVerdict | None:
        """Tells other hosts that this one makes no progress, and judges when none does."""
        told = channel.read("verdict")
        if told:
            return HangVerdict.from_json(json.loads(told))
        if found is not None and found.kind in ("mismatch", "stopped"):
            channel.publish("verdict", json.dumps(found.to_json()))
            return found
        if found is None:
            if self._published_s is not None and not self._watch.stands_still(now):
                channel.publish(f"host/{self.host}", "")
                self._published_s = None
            if self._published_s is None:
                if channel.read("asked"):
                    channel.publish(f"lives/{self.host}", repr(now))
                self._ask_others(channel, now)
                return None
        elif self._published_s is None:
            self._published_s = now
            channel.publish(f"host/{self.host}", views_to_text(self._watch.last_views, now))
        self._ask_others(channel, now)
        views = {host: self._views_of(channel, host, now) for host in self.hosts}
        silent = [host for host, found_there in views.items() if not found_there]
        verdict = None
        if not silent:
            verdict = judge([view for each in views.values() for view in each], now, _NO_LIMIT)
        else:
            limit_s = self.policy.limits.step_s
            patience_s = max(_ANSWER_S, min(_LONGEST_ANSWER_S, limit_s / 4))
            is_late = self._watch.still_s(now) > _BEAT_S + _TAKES_OVER_S  # else another rank there may answer soon
            mute = [host for host in silent if is_late and now - self._heard[host][1] > patience_s]
            if mute or (self._published_s is not None and now - self._published_s > limit_s + 2 * _BEAT_S):
                verdict = self._mute_hosts(mute or silent, do_answer=not mute)
        if verdict is not None:
            channel.publish("verdict", json.dumps(verdict.to_json()))
        return verdict

    def _views_of(self, channel: SideChannel, host: str, now: float) -> list[LedgerView]:
        """Returns the ranks of a host that stand still or have left; none while one of them may move."""
        text = channel.read(f"host/{host}")
        if text or self.left is None or host == self.host:
            return views_from_text(text, now) if text else []
        return self.left.of_host(host, now)

    def _wait_for_others(self, channel: SideChannel) -> None:
        """Waits until every host has the verdict: the store may be a rank's, and ends with it."""
        deadline = time.monotonic() + _ANSWER_S
        with contextlib.suppress(CommunicationError):
            channel.publish(f"has/{self.host}", "it")
            while time.monotonic() < deadline and not all(channel.read(f"has/{host}") for host in self.hosts):
                time.sleep(_ASK_S)

    def _ask_others(self, channel: SideChannel, now: float) -> None:
        """Asks other hosts whether they live, once this one has stood still for half of the limit."""
        if self._watch.still_s(now) < self.policy.limits.step_s / 2:
            if self._heard:
                channel.publish("asked", "")
            self._heard = {}
            return
        channel.publish("asked", "do you live?")
        for host in self.hosts:
            text = channel.read(f"lives/{host}") if host != self.host else ""
            before, since_s = self._heard.get(host, (text, now))
            self._heard[host] = (text, now if text != before else since_s)

    def _mute_hosts(self, hosts: list[str], *, do_answer: bool) -> HangVerdict:
        if do_answer:
            return self._without(hosts, f"the ranks of {self._name(hosts)} move, and do not come")
        why = f"nothing is heard of {self._name(hosts)}: {_UNHEARD}, or no rank there lets its Python run"
        return self._without(hosts, why)

    def _cut_off(self) -> HangVerdict:
        """Says that the store, which is on the first host, does not answer this one."""
        first = next(iter(self.hosts))
        hosts = [first] if first != self.host else [host for host in self.hosts if host != self.host]
        return self._without(hosts, f"nothing is heard of {self._name(hosts)}: {_UNHEARD}")

    def _name(self, hosts: list[str]) -> str:
        ranks = {host: ", ".join(map(str, self.hosts[host])) for host in hosts}
        return ", ".join(f"{host} (rank{'' if each.isdecimal() else 's'} {each})" for host, each in ranks.items())

    def _without(self, hosts: list[str], why: str) -> HangVerdict:
        """Blames the ranks of other hosts, with what those of this one wait in."""
        states = tuple(self.states())
        own = "; ".join(f"rank {state.rank} {state.does}" for state in states)
        ranks = sorted(rank for host in hosts for rank in self.hosts[host])
        sentence = f"the ranks of {self.host} stand still, and {why}; {own}"
        return HangVerdict(kind="missing", ranks=tuple(ranks), sentence=sentence, states=states)

    def _leave(self, verdict: HangVerdict) -> NoReturn:
        """Ends the ranks of this host, and this one with the code that says why."""
        with contextlib.suppress(OSError):  # of a disk that is full
            self.tell(verdict)
        if self.channel is not None:
            self._wait_for_others(self.channel)
        end_ranks(self.folder, verdict, self._watch.processes(), is_told=True)
        tell_agent(verdict.sentence, verdict.to_text(), time.time())
        end_children()
        os._exit(HUNG)  # without a flush of standard output, for which a rank that hangs may hold the lock
