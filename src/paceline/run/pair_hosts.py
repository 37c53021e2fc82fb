"""Are ranks of different hosts in the same step? Once a second, hosts leave for one another what their updates were.

The first rank of a host leaves its history of updates (``health/pairing.py``) at the store, and compares it with that
of the host before it. So every host reads one text of a few kilobytes, however many there are. Ranks of one host
compare themselves (``run/own_loop.py``), so that a difference between any two ranks is found by some pair. It is done
in the thread that watches: no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.comm.ledger.file import LedgerReader
from paceline.comm.side_channel import SideChannel
from paceline.health.ledger_text import updates_from_text, updates_to_text
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
    _pair: PairedRanks = field(default_factory=PairedRanks)
    _compared: int = 0  # after how many collectives the last comparison was
    _published: int = 0
    _next_s: float = 0.0

    def look(self, now: float) -> HangVerdict | None:
        """Leaves this rank's updates and compares, when it is time to. Raises CommunicationError: no store."""
        if now < self._next_s:
            return None
        self._next_s = now + _EVERY_S
        names = list(self.hosts)
        place = names.index(self.host)
        own = [(each, self.ledger.collective_before(each)) for each in self.history.updates()]
        if own and own[-1][0].collectives > self._published and place + 1 < len(names):
            self._published = own[-1][0].collectives
            self.channel.publish(f"updates/{self.host}", updates_to_text(own))
        text = self.channel.read(f"updates/{names[place - 1]}") if place else ""
        if not own or not text:
            return None
        known = {update.collectives: (update, entry) for update, entry in own}
        ranks = self.hosts[self.host][0], self.hosts[names[place - 1]][0]
        everybody = GroupName(tuple(sorted(rank for each in self.hosts.values() for rank in each)))
        try:
            others = updates_from_text(text, everybody)
        except ValueError:  # whoever left that, it was no rank of ours
            return None
        for other, there in others:
            if other.collectives <= self._compared or other.collectives not in known:
                continue
            self._compared = other.collectives
            update, here = known[other.collectives]
            found = self._pair.compare(update, other)
            if found is not None:
                return pairing_verdict(found, ranks, (here, there), self.name_of(found.counter))
        return None
