"""The files by which a plan of faults reaches the ranks, and by which they say what they did.

    plan.json       seed and faults, written once
    fired.jsonl     one line for each fault of each rank, written before it happens: it happens once, also over restarts
    started.jsonl   one line for each attempt, of rank 0: the step that it begins with
    passed.jsonl    one line for each fault whose step has been trained after it

A line is one ``write`` to a file that is opened for appending, so that ranks do not mix theirs, and SIGKILL right after
it loses nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

from paceline.chaos.faults import Fault
from paceline.untrusted import parse_json_object, read_regular

VARIABLE: Final = "PACELINE_CHAOS"
"""Names the folder of these files to the ranks; set by ``paceline chaos`` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """A fault that happened: on which rank, in which step, after how many samples, and when."""

    number: int
    rank: int
    step: int
    position: int
    time: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An attempt that begins to train, after so many steps and samples."""

    step: int
    position: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The first step after a fault that had not been trained before it; ``is_later``: in a later attempt."""

    number: int
    step: int
    is_later: bool
    time: float


def write_plan(folder: Path, seed: int, faults: Sequence[Fault]) -> None:
    """Writes the plan for the ranks; ``seed`` says at which byte or bit faults happen."""
    content = {"seed": seed, "faults": [asdict(fault) for fault in faults]}
    (folder / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> tuple[int, list[Fault]]:
    """Reads the plan back: its seed and faults."""
    content = parse_json_object(read_regular(folder / "plan.json"))
    return content["seed"], [Fault(**values) for values in content["faults"]]


def note(folder: Path, what: Fired | Started | Passed) -> None:
    """Notes what is about to happen, or has."""
    descriptor = os.open(folder / _FILES[type(what)], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, (json.dumps(asdict(what)) + "\n").encode())
    finally:
        os.close(descriptor)


def read_notes(folder: Path, kind: type[_Note]) -> list[_Note]:
    """Returns what has been noted so far, in the order of time."""
    try:
        lines = (folder / _FILES[kind]).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return sorted((kind(**parse_json_object(line)) for line in lines), key=lambda noted: noted.time)


_Note = TypeVar("_Note", Fired, Started, Passed)
_FILES: Final[dict[type, str]] = {Fired: "fired.jsonl", Started: "started.jsonl", Passed: "passed.jsonl"}
