"""One thing that a verification has looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at: what, what was found in words, and whether it is as it should be.

    ``is_done`` is False where there was nothing to check it by.
    """

    what: str
    finding: str
    problems: tuple[str, ...] = ()
    is_done: bool = True

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems
