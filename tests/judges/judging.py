"""What judges share: how a case ended, ranks that are sent cases, and cases that one process runs for all workers."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from gloo_pool import GlooPool
from oracle import to_host

from paceline.comm.base import Communicator
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


def told_by_a_rank(comm: Communicator, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns what some work returns, on the host; a refusal too, which a pool would take for a rank that failed."""
    warnings.simplefilter("ignore")
    try:
        return to_host(work(comm, *args))
    except UsageError as error:
        return error


def on_pool(pool: GlooPool, work: Callable[..., T], *args: Any, ranks: int = 2) -> list[T]:
    """Runs some work on ranks of a pool. The first case of a kind loads a library, and compilers take their time."""
    found = pool.run(told_by_a_rank, work, args, ranks=ranks, group_timeout_s=120.0, timeout_s=150.0)
    for each in found:
        if isinstance(each, UsageError):
            raise each
    return found


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
