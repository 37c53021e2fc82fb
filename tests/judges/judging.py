"""What judges share: whether a case was refused in our words, and cases that one process runs for all workers."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from paceline.errors import RankFailedError, UsageError

T = TypeVar("T")


def outcome_of(work: Callable[[], T]) -> T:
    """Returns what some work returns; a refusal with rule and fix ends the test as refused, another error fails it."""
    try:
        return work()
    except (RankFailedError, UsageError) as error:
        cause = error.error if isinstance(error, RankFailedError) else error
        if not isinstance(cause, UsageError):
            raise
        pytest.skip(f"refused: {cause}")


def end_as(outcome: str, why: str) -> None:
    """Ends a test as the case ended in another process: passed, skipped, refused in our words, or failed."""
    if outcome == "skipped":
        pytest.skip(f"torch's own words: {why}")
    refusal = why.partition("paceline.errors.UsageError: ")[2]
    if refusal:
        pytest.skip(f"refused: {refusal}")
    assert outcome == "passed", why


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter that the tests of this file have in this run."""
    items = (item for item in request.session.items if item.path == request.path)
    return [item.callspec.params[parameter] for item in items if hasattr(item, "callspec")]


def run_once(folder: Path, name: str, work: Callable[[Path], None]) -> list[Any]:
    """Returns the rows that some work writes to a file; one worker does it, whom the others wait for."""
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "judges"
    shared.mkdir(exist_ok=True)
    output = shared / f"{name}.jsonl"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            work(output)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
