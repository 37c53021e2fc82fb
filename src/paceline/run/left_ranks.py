"""Ranks of other hosts that have left a loop of the user's own, as they should: a rank that waits for one is told so.

A rank that ends its loop before the others takes its process along, and what is left of it on other hosts is a closed
connection. So it leaves its last operation and its step at the store. Rank 0 may hold that store: it stays for a
moment, until every other host has read that it goes, or has left too. From then on nobody asks the store, which
would only make torch complain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.comm.control.store import SideChannel
from paceline.errors import CommunicationError
from paceline.health.ledger_text import views_from_text, views_to_text
from paceline.health.ledger_view import LedgerView
from paceline.health.verdict import HangLimits, HangVerdict, judge

_NO_LIMIT = HangLimits(step_s=0.0, setup_s=0.0)
_ASK_S = 0.02
_STAYS_S = 1.5  # the watch of a host looks several times in it
_READS_S = 2.0


def left_key(rank: int) -> str:
    """Returns the name under which a rank says that it leaves."""
    return f"left/{rank}"


@dataclass(slots=True, kw_only=True)
class LeftRanks:
    """What this rank knows of ranks on other hosts that have left.

    ``hosts`` are the ranks of every host by its name, ``host`` is this one's. ``has_store``: rank 0 holds the store.
    """

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
        if self.has_store and 0 not in self.hosts[self.host] and 0 not in self._known:
            self._read(0, now)
            if 0 in self._known:
                self.channel.publish(f"seen/{self.host}", "rank 0")

    def of_host(self, host: str, now: float) -> list[LedgerView]:
        """Returns the ranks of a host, if all of them have left; else none."""
        for rank in self.hosts[host]:
            if rank not in self._known:
                self._read(rank, now)
            if rank not in self._known:
                return []
        return [self._known[rank] for rank in self.hosts[host]]

    def explain(self, views: Sequence[LedgerView], now: float) -> HangVerdict | None:
        """Returns a verdict if one of ``views``, which are this host's ranks, waits for a rank that has left."""
        verdict = self._judge(views, now)
        deadline = time.monotonic() + _READS_S
        with contextlib.suppress(CommunicationError):
            for rank in [rank for host, ranks in self.hosts.items() if host != self.host for rank in ranks]:
                if verdict is not None or self.is_store_gone or time.monotonic() > deadline:
                    break
                if rank not in self._known:
                    self._read(rank, now)
                    verdict = self._judge(views, now) if rank in self._known else None
        return verdict

    def leave(self, view: LedgerView, now: float) -> None:
        """Says that this rank leaves, with an error or without; ``view`` is what its ledger says.

        Rank 0 stays for a moment, if it must.
        """
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

    def _read(self, rank: int, now: float) -> None:
        text = self.channel.read(left_key(rank))
        if text:
            self._known.update((view.rank, view) for view in views_from_text(text, now))

    def _judge(self, views: Sequence[LedgerView], now: float) -> HangVerdict | None:
        if not self._known or any(view.state == "failed" for view in self._known.values()):
            return None  # whoever failed says why
        found = judge([*views, *self._known.values()], now, _NO_LIMIT)
        return found if found is not None and found.kind == "left" else None
