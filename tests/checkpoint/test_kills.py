"""SIGKILL at any byte of a save: the next start finds a whole checkpoint, at most one save old."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "pool" / "kill_saves.py"


def kill(folder: Path, number: int) -> list[dict[str, Any]]:
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "0", str(number)], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def check(attempts: list[dict[str, Any]]) -> None:
    for attempt in attempts:
        assert attempt["is_right"], attempt
        assert attempt["found"] >= attempt["promised"], attempt
        assert attempt["left"] == [], attempt
    # Of the others, threads take turns as they like.
    at_once = [attempt for attempt in attempts if attempt["seed"] % 2 == 0]
    assert sum(attempt["killed"] for attempt in at_once) >= len(at_once) / 2
    assert len({attempt["found"] for attempt in at_once}) >= min(4, len(at_once) - 1)


def test_a_save_that_is_killed_costs_no_more_than_itself(tmp_path: Path) -> None:
    check(kill(tmp_path, 6))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_kills(tmp_path: Path) -> None:
    check(kill(tmp_path, 200))
