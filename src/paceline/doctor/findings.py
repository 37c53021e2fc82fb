"""What a check found, what it means and what to do about it.

A check is a function from the surroundings to findings. Nothing here stops at the first problem: a machine that has
one often has two, and a check that fails by itself is a finding too.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from paceline.config import Config

Status: TypeAlias = Literal["ok", "note", "problem"]

NEEDED = ("numpy", "psutil", "pydantic", "rich", "torch", "yaml")  # modules that every run imports


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. A ``note`` is worth knowing; a ``problem`` will stop or mislead a run."""

    name: str
    status: Status
    found: str
    meaning: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What checks are told: the environment's variables, the run that is meant if any, and where runs are kept.

    ``is_quick`` leaves out what starts processes or compiles.
    """

    environment: Mapping[str, str]
    config: Config | None = None
    runs: Path = Path("runs")
    is_quick: bool = False


Check: TypeAlias = Callable[[Surroundings], Iterable[Finding]]


def missing_packages(names: Iterable[str] = NEEDED) -> list[Finding]:
    """Finds what Paceline itself cannot do without. Needs nothing but Python, so that it can always be told."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    return [
        Finding(
            name="packages",
            status="problem",
            found=f"not installed: {', '.join(missing)}",
            meaning="Paceline needs them, and nothing else could be looked at",
            fix="install paceline with pip, which brings them, into this Python: " + sys.executable,
        )
    ]


def examine(checks: Iterable[Check], surroundings: Surroundings) -> list[Finding]:
    """Runs all checks. One that raises is a problem of its own, under its name."""
    return [finding for check in checks for finding in _findings_of(check, surroundings)]


def _findings_of(check: Check, surroundings: Surroundings) -> list[Finding]:
    try:
        return list(check(surroundings))
    except Exception as error:  # whatever it is, the other checks still tell something
        return [
            Finding(
                name=check.__name__.replace("_", " "),
                status="problem",
                found=f"the check failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                meaning="this machine answers in a way that was not foreseen",
                fix="look at the message; a run may fail in the same place",
            )
        ]
