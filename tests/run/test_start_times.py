"""How long a run took to its first step: parts that add up, told once."""

from __future__ import annotations

import os
import time
from typing import Any

from paceline.run.worker import StartTimes, process_age


class Notes:
    """Takes what a trainer notes, and stands for the result of a step."""

    step = 7

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, float], int]] = []

    def note(self, name: str, detail: dict[str, float], *, step: int) -> None:
        self.found.append((name, detail, step))


def test_the_parts_add_up_and_are_told_after_the_first_step() -> None:
    times, notes = StartTimes(time.monotonic() - 2.0), Notes()
    for part in ("processes", "data"):
        times.lap(part)
    told: Any = notes
    times(told, told)
    times(told, told)
    ((name, detail, step),) = notes.found
    assert (name, step, list(detail)) == ("first_step", 7, ["seconds", "processes", "data", "step"])
    assert detail["processes"] >= 2.0
    assert abs(detail["seconds"] - sum(list(detail.values())[1:])) < 0.01


def test_a_process_has_an_age_and_one_that_is_gone_has_none() -> None:
    ours = process_age(os.getpid())
    assert 0.0 < ours < process_age(1) + 1.0
    assert process_age(2**22 + 1) == 0.0
