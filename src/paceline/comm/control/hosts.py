"""Which hosts take part in a run: who waits, who is in, and when a round of them begins. No clock of its own.

A round begins when nobody is left of the one before, at least ``least`` hosts wait, and either all ``most`` are there
or ``last_call_s`` have passed since there were enough. A host that joins again has left its round. One that has not
been heard of for ``silence_s`` is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, by names that their launchers chose, in the order in which they came first."""

    least: int = 1
    most: int = 1
    last_call_s: float = 3.0
    silence_s: float = 3.0
    round: int = 0
    members: tuple[str, ...] = ()  # of the round, as it began
    is_closed: bool = False
    _staying: set[str] = field(default_factory=set)  # of the members
    _waiting: set[str] = field(default_factory=set)
    _heard: dict[str, float] = field(default_factory=dict)
    _enough_since: float | None = None

    def join(self, host: str, now: float) -> None:
        """Has a host wait for the next round; it leaves the one that it is in."""
        self._staying.discard(host)
        self._waiting.add(host)
        self.hear(host, now)

    def hear(self, host: str, now: float) -> None:
        """Notes a sign of life."""
        self._heard[host] = now

    def leave(self, host: str) -> None:
        """Forgets a host."""
        self._staying.discard(host)
        self._waiting.discard(host)
        self._heard.pop(host, None)

    def update(self, now: float) -> None:
        """Begins a round if it is time to."""
        for host in [host for host, heard in self._heard.items() if now - heard > self.silence_s]:
            self.leave(host)
        if self._staying or len(self._waiting) < self.least:
            self._enough_since = None
            return
        if self._enough_since is None:
            self._enough_since = now
        if len(self._waiting) >= self.most or now - self._enough_since >= self.last_call_s:
            self.members = tuple(host for host in self._heard if host in self._waiting)[: self.most]
            self._waiting.difference_update(self.members)
            self._staying = set(self.members)
            self.round += 1
            self._enough_since = None

    @property
    def num_waiting(self) -> int:
        """How many hosts wait that the next round has room for."""
        return min(len(self._waiting), self.most - len(self._staying))

    @property
    def num_gone(self) -> int:
        """How many hosts of the round have left or are not heard of any more."""
        return len(set(self.members) - self._heard.keys())

    @property
    def present(self) -> set[str]:
        """The hosts that have been heard of and have not left."""
        return set(self._heard)
