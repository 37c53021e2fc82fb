"""A wish to stop, as a signal leaves it: read by the loop, written by a handler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopRequest:
    """What a signal leaves for the loop: its number, 0 before one came."""

    signal: int = 0

    def ask(self, number: int) -> None:
        """Asks for a stop. Safe in a signal handler."""
        self.signal = number
