"""What hosts of one run leave for one another at the store, all of it in the thread that watches: no step waits for it.

**Which rank is late.** Every period each host leaves the last operations before a common moment, and what its steps
took; half a period on, the host of rank 0 reads what all left, and compares (``health/straggler.py``). The moments are
common because clocks are compared at the start, by texts to and fro: of some rounds the fastest counts, as half of it
is what may be wrong. From then on the hosts' time services keep them. A text has some kilobytes.

**Ranks that have left** a loop of the user's own leave their last operation and step: other hosts see nothing but a
closed connection, and a rank that waits for one is told so. Rank 0 may hold the store: it stays until every other host
has read that it goes, or has left too. From then on nobody asks the store, which would only make torch complain.

**Are ranks in the same step?** Once a second the first rank of a host leaves its history of updates, and compares it
with that of the host before it (``health/pairing.py``); ranks of one host compare themselves (``own_loop.py``).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.comm.control.store import SideChannel
from paceline.comm.ledger.file import LedgerReader
from paceline.errors import CommunicationError
from paceline.health import pairing
from paceline.health.ledger_view import GroupName, LedgerView, views_from_text, views_to_text
from paceline.health.straggler import Lateness, RankLook, Straggler, looks_from_text, looks_to_text
from paceline.health.verdict import AT_ONCE, HangVerdict, judge

_ROUNDS = 5
_LAST = 16  # operations of a rank that are compared
_ASK_S = 0.02
_STAYS_S = 1.5  # the watch of a host looks several times in it
_READS_S = 2.0
_EVERY_S = 1.0


def clock_ahead(
    channel: SideChannel, host: str, hosts: Sequence[str], now: Callable[[], float] = time.time
) -> float | None:
    """Returns how far this host's time is ahead of the first one's; None: unknown. ``2 x rounds`` texts a host."""
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
    """Publishes the times of one host's ranks, which ``take`` returns; the first host compares those of all."""

    channel: SideChannel
    host: str
    hosts: Sequence[str]
    take: Callable[[], list[RankLook]]
    lateness: Lateness
    period_s: float
    now: Callable[[], float] = time.time
    _ahead_s: float | None = None
    _moment: float = 0.0
    _own: str = ""
    _is_compared: bool = True

    def compare_clocks(self) -> float | None:
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
        if len(found) < len(self.hosts) or any(each[0] != moment for each in found):
            return None
        looks = [looks_from_text(text) for _, text in found]  # none of a host whose ranks do not run yet, or any more
        return self.lateness.look([look for each in looks for look in each]) if all(looks) else None

    def _looks(self, now: float, moment: float) -> list[RankLook]:
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


def left_key(rank: int) -> str:
    return f"left/{rank}"


@dataclass(slots=True, kw_only=True)
class LeftRanks:
    """What this rank knows of ranks on other hosts that have left; ``has_store``: rank 0 holds the store."""

    channel: SideChannel
    host: str
    hosts: Mapping[str, Sequence[int]]
    has_store: bool
    _known: dict[int, LedgerView] = field(default_factory=dict)

    @property
    def is_store_gone(self) -> bool:
        """Whether the store went with rank 0, or is about to."""
        return self.has_store and 0 in self._known

    def look(self, now: float) -> None:
        """Reads whether rank 0 has left, and acknowledges it; one thread of a host calls it, every now and then."""
        if self.has_store and 0 not in self.hosts[self.host] and 0 not in self._known and self._read(0, now):
            self.channel.publish(f"seen/{self.host}", "rank 0")

    def of_host(self, host: str, now: float) -> list[LedgerView]:
        """Returns the ranks of a host, if all of them have left; else none."""
        has_left = all(self._read(rank, now) for rank in self.hosts[host])
        return [self._known[rank] for rank in self.hosts[host]] if has_left else []

    def explain(self, views: Sequence[LedgerView], now: float) -> HangVerdict | None:
        """Returns a verdict if one of ``views``, which are this host's ranks, waits for a rank that has left."""
        verdict = self._judge(views, now)
        deadline = time.monotonic() + _READS_S
        with contextlib.suppress(CommunicationError):
            for rank in [rank for host, ranks in self.hosts.items() if host != self.host for rank in ranks]:
                if verdict is not None or self.is_store_gone or time.monotonic() > deadline:
                    break
                if rank not in self._known and self._read(rank, now):
                    verdict = self._judge(views, now)
        return verdict

    def leave(self, view: LedgerView, now: float) -> None:
        """Says that this rank leaves, with an error or without; rank 0 stays for a moment, if it must."""
        if self.is_store_gone:
            return
        with contextlib.suppress(CommunicationError):
            self.channel.publish(left_key(view.rank), views_to_text([view], now))
            deadline = time.monotonic() + _STAYS_S
            waits_for = [host for host in self.hosts if host != self.host] if self.has_store and view.rank == 0 else []
            while waits_for and time.monotonic() < deadline:
                # Whoever has left too, or has read this, needs this rank's store no more.
                waits_for = [h for h in waits_for if not (self.channel.read(f"seen/{h}") or self.of_host(h, now))]
                time.sleep(_ASK_S if waits_for else 0.0)

    def _read(self, rank: int, now: float) -> bool:
        if rank not in self._known and (text := self.channel.read(left_key(rank))):
            self._known.update((view.rank, view) for view in views_from_text(text, now))
        return rank in self._known

    def _judge(self, views: Sequence[LedgerView], now: float) -> HangVerdict | None:
        if not self._known or any(view.state == "failed" for view in self._known.values()):
            return None  # whoever failed says why
        found = judge([*views, *self._known.values()], now, AT_ONCE)
        return found if found is not None and found.kind == "left" else None


@dataclass(slots=True, kw_only=True)
class PairedHosts:
    """Compares the updates of the first rank of this host with those of the host before it."""

    channel: SideChannel
    host: str
    hosts: Mapping[str, Sequence[int]]
    ledger: LedgerReader
    name_of: Callable[[int | None], str]
    history: pairing.UpdateHistory = field(default_factory=pairing.UpdateHistory)
    _before: pairing.PairedRanks = field(default_factory=pairing.PairedRanks)
    _published: int = 0
    _next_s: float = 0.0

    def look(self, now: float) -> HangVerdict | None:
        """Leaves this rank's updates and compares, when it is time to. Raises CommunicationError: no store."""
        if now < self._next_s:
            return None
        self._next_s = now + _EVERY_S
        names, own = list(self.hosts), self._own()
        place = names.index(self.host)
        if place + 1 < len(names):
            self._publish(own)
        return self._compare(own, names[place - 1], self._before) if place else None

    def finish(self) -> HangVerdict | None:
        """Compares with the hosts before and after this one, at the end of the loop. Raises CommunicationError."""
        names, own = list(self.hosts), self._own()
        place = names.index(self.host)
        self._publish(own)
        beside = [names[at] for at in (place - 1, place + 1) if 0 <= at < len(names)]
        found = (self._compare(own, name, pairing.PairedRanks()) for name in beside)
        return next((verdict for verdict in found if verdict is not None), None)

    def _own(self) -> list[pairing.PlacedUpdate]:
        return [(each, self.ledger.collective_before(each)) for each in self.history.updates()]

    def _publish(self, own: Sequence[pairing.PlacedUpdate]) -> None:
        if own and own[-1][0].collectives > self._published:
            self._published = own[-1][0].collectives
            self.channel.publish(f"updates/{self.host}", pairing.updates_to_text(own))

    def _compare(self, own: Sequence[pairing.PlacedUpdate], host: str, pair: pairing.PairedRanks) -> HangVerdict | None:
        """Compares this rank's updates with what another host has left, as far as they were not compared before."""
        text = self.channel.read(f"updates/{host}")
        if not own or not text:
            return None
        known = {update.collectives: (update, entry) for update, entry in own}
        ranks = self.hosts[self.host][0], self.hosts[host][0]
        everybody = GroupName(tuple(sorted(rank for each in self.hosts.values() for rank in each)))
        try:
            others = pairing.updates_from_text(text, everybody)
        except ValueError:  # whoever left that, it was no rank of ours
            return None
        for other, there in others:
            if other.collectives <= pair.compared or other.collectives not in known:
                continue
            update, here = known[other.collectives]
            found = pair.compare(update, other)
            if found is not None:
                return pairing.pairing_verdict(found, ranks, (here, there), self.name_of(found.counter))
        return None
