"""Are ranks of different hosts in the same step? Once a second, hosts leave for one another what their updates were.

The first rank of a host leaves its history of updates (``health/pairing.py``) at the store, and compares it with that
of the host before it. So every host reads one text of a few kilobytes, however many there are. Ranks of one host
compare themselves (``run/own_loop.py``), so that a difference between any two ranks is found by some pair. It is done
in the thread that watches: no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.comm.control.store import SideChannel
from paceline.comm.ledger.file import LedgerReader
from paceline.health.ledger_text import PlacedUpdate, updates_from_text, updates_to_text
from paceline.health.ledger_view import GroupName
from paceline.health.pairing import PairedRanks, UpdateHistory, pairing_verdict
from paceline.health.verdict import HangVerdict

_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class PairedHosts:
    """Compares the updates of the first rank of this host with those of the host before it.

    ``hosts`` are the ranks of every host by its name; ``name_of`` returns the name of a counter.
    """

    channel: SideChannel
    host: str
    hosts: Mapping[str, Sequence[int]]
    ledger: LedgerReader
    name_of: Callable[[int | None], str]
    history: UpdateHistory = field(default_factory=UpdateHistory)
    _before: _Neighbour = field(default_factory=lambda: _Neighbour())
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
        """Compares with the hosts before and after this one at the end of the loop. Raises CommunicationError.

        Of two hosts, the one that ends later finds a difference.
        """
        names, own = list(self.hosts), self._own()
        place = names.index(self.host)
        self._publish(own)
        beside = [names[at] for at in (place - 1, place + 1) if 0 <= at < len(names)]
        found = (self._compare(own, name, _Neighbour()) for name in beside)
        return next((verdict for verdict in found if verdict is not None), None)

    def _own(self) -> list[PlacedUpdate]:
        return [(each, self.ledger.collective_before(each)) for each in self.history.updates()]

    def _publish(self, own: Sequence[PlacedUpdate]) -> None:
        if own and own[-1][0].collectives > self._published:
            self._published = own[-1][0].collectives
            self.channel.publish(f"updates/{self.host}", updates_to_text(own))

    def _compare(self, own: Sequence[PlacedUpdate], host: str, neighbour: _Neighbour) -> HangVerdict | None:
        """Compares this rank's updates with what another host has left, as far as they were not compared before."""
        text = self.channel.read(f"updates/{host}")
        if not own or not text:
            return None
        known = {update.collectives: (update, entry) for update, entry in own}
        ranks = self.hosts[self.host][0], self.hosts[host][0]
        everybody = GroupName(tuple(sorted(rank for each in self.hosts.values() for rank in each)))
        try:
            others = updates_from_text(text, everybody)
        except ValueError:  # whoever left that, it was no rank of ours
            return None
        for other, there in others:
            if other.collectives <= neighbour.compared or other.collectives not in known:
                continue
            neighbour.compared = other.collectives
            update, here = known[other.collectives]
            found = neighbour.pair.compare(update, other)
            if found is not None:
                return pairing_verdict(found, ranks, (here, there), self.name_of(found.counter))
        return None


@dataclass(slots=True)
class _Neighbour:
    """How far the updates of another host were compared, in collectives."""

    pair: PairedRanks = field(default_factory=PairedRanks)
    compared: int = 0
