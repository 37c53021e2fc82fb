"""What a check found, what it means and what to do. None stops the others: one that fails is a finding, too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from paceline.config import Config

Status: TypeAlias = Literal["ok", "note", "problem"]

NEEDED = ("numpy", "psutil", "pydantic", "rich", "torch", "yaml")  # modules that every run imports


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFinding:
    """One thing that was looked at. A ``note`` is worth knowing; a ``problem`` will stop or mislead a run."""

    name: str
    status: Status
    found: str
    meaning: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorInputs:
    """What checks may look at: the environment's variables, the run that is meant if any, and where runs are kept."""

    environment: Mapping[str, str]
    config: Config | None = None
    runs: Path = Path("runs")
    is_quick: bool = False  # leaves out what starts processes or compiles


def finding(name: str, found: str, meaning: str, *, problem: str = "", note: str = "") -> MachineFinding:
    """Returns a finding. ``problem`` or ``note`` says what to do about it; without either, all is well."""
    status: Status = "problem" if problem else "note" if note else "ok"
    return MachineFinding(name=name, status=status, found=found, meaning=meaning, fix=problem or note)


MachineCheck: TypeAlias = Callable[[DoctorInputs], Iterable[MachineFinding]]


def missing_packages(names: Iterable[str] = NEEDED) -> list[MachineFinding]:
    """Finds what Paceline itself cannot do without. Needs nothing but Python, so that it can always be reported."""
    if not (missing := [name for name in names if importlib.util.find_spec(name) is None]):
        return []
    meaning = "Paceline needs them, and nothing else could be looked at"
    fix = f"install paceline with pip, which brings them, into this Python: {sys.executable}"
    return [finding("packages", f"not installed: {', '.join(missing)}", meaning, problem=fix)]


def examine(checks: Iterable[MachineCheck], surroundings: DoctorInputs) -> list[MachineFinding]:
    """Runs all checks. One that raises is a problem of its own, under its name."""
    found: list[MachineFinding] = []
    for check in checks:
        try:
            found += list(check(surroundings))
        except Exception as error:  # whatever it is, the other checks still tell something
            name = check.__name__.replace("_", " ")
            why = f"the check failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            meaning = "this machine answers in a way that was not foreseen"
            found.append(finding(name, why, meaning, problem="look at the message; a run may fail in the same place"))
    return found
