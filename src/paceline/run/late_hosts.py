"""Which rank is late where ranks are on several hosts: every host leaves its times at the store, and one compares.

    every period      each host leaves the last operations before a common moment, and what its steps took
    half a period on  the host of rank 0 reads what all left, and compares (``health/straggler.py``)

The moments are common because clocks are compared at the start, by texts to and fro through the store: of some rounds
the fastest counts, as half of it is what may be wrong. From then on the hosts' time services keep them. A text has some
kilobytes. No rank waits for any of it: it is done in the thread that watches.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.comm.control.store import SideChannel
from paceline.errors import CommunicationError
from paceline.health.ledger_text import looks_from_text, looks_to_text
from paceline.health.straggler import Lateness, RankLook, Straggler

_ROUNDS = 5
_LAST = 16  # operations of a rank that are compared


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
    take: Callable[[], list[RankLook]]
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
        if len(found) < len(self.hosts) or any(each[0] != moment for each in found):
            return None
        looks = [
            looks_from_text(text) for _, text in found
        ]  # none of a host whose ranks have yet to begin, or are done
        return self.lateness.look([look for each in looks for look in each]) if all(looks) else None

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
