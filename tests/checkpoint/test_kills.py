"""SIGKILL at any byte of a save: the next start finds a whole checkpoint, at most one save old."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

POOL = Path(__file__).parents[1] / "pool"


def kill(folder: Path, number: int, ranks: int = 0) -> list[dict[str, Any]]:
    """Kills processes of virtual ranks, then single real ranks; returns what came of each."""
    command = [sys.executable, "-m", "kill_saves", str(folder), "0", str(number), str(ranks)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(POOL), os.environ.get("PYTHONPATH", "")])}
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines() if not line.startswith("[Gloo]")]


def check(attempts: list[dict[str, Any]]) -> None:
    for attempt in attempts:
        assert attempt["is_right"], attempt
        assert attempt["found"] >= attempt["promised"], attempt
        assert attempt["left"] == [], attempt
    # Of the others, threads take turns as they like.
    at_once = [attempt for attempt in attempts if attempt["seed"] % 2 == 0]
    assert sum(attempt["killed"] for attempt in at_once) >= len(at_once) / 2
    assert len({attempt["found"] for attempt in at_once}) >= min(4, len(at_once) - 1)


def check_ranks(attempts: list[dict[str, Any]]) -> None:
    for attempt in attempts:
        assert attempt["is_right"], attempt  # to the bit
        assert attempt["found"] >= max(attempt["promised"], attempt["begun"] - attempt["every"]), attempt
        assert attempt["passed_over"] == [], attempt
        assert attempt["goes_on"], attempt
        assert attempt["left"] == [], attempt
        assert set(attempt["codes"]) <= {-signal.SIGKILL, 0, attempt["lost"]}, attempt
    at_a_byte = [attempt for attempt in attempts if attempt["last"] is not None]
    assert all(attempt["codes"][attempt["victim"]] == -signal.SIGKILL for attempt in at_a_byte)


def test_a_save_that_is_killed_costs_no_more_than_itself(tmp_path: Path) -> None:
    found = kill(tmp_path, 3, ranks=1)
    check(found[:3])
    check_ranks(found[3:])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_kills(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    record_property("faults", 200)
    check(kill(tmp_path, 200))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_kills_of_single_real_ranks(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    record_property("faults", 100)
    found = kill(tmp_path, 0, ranks=100)
    check_ranks(found)
    killed = [each for each in found if each["codes"][each["victim"]] == -signal.SIGKILL]
    for rank in (0, 1):
        for in_background in (False, True):
            assert sum((each["victim"], each["in_background"]) == (rank, in_background) for each in killed) >= 15
