"""What is made of the steps and of what the browser saw: delays, and ratios within a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import STEP

pytest.importorskip("websockets")

from live import delays, ratios


def test_a_step_is_seen_when_a_later_one_is() -> None:
    steps = [replace(STEP, step=number, time=100.0 + number) for number in range(1, 8)]
    seen = [[[2.0, 102.5], [5.0, 105.75], [6.0, 106.25]], []]
    # Steps 1 and 2 were there before anybody looked; 3 and 4 came with 5; 7 was never seen.
    assert delays(steps, seen) == [2.75, 1.75, 0.75, 0.25]


def test_an_arm_is_compared_with_nobody_in_the_same_round() -> None:
    lengths = {0: 1.0, 10: 1.5, 20: 2.0, 30: 4.0, 40: 4.0, 50: 2.0}
    steps = [
        replace(STEP, step_s=length, time=start + number * length)
        for start, length in lengths.items()
        for number in (1, 2, 3)
    ]
    arms = ("nobody", "page", "browser", "page", "browser", "nobody")
    turns = [(arm, float(start), start + 10.0) for arm, start in zip(arms, lengths, strict=True)]
    found = ratios(steps, turns)
    assert found["page"] == [(1.5, 1.5), (4.0, 2.0)]
    assert found["browser"] == [(2.0, 2.0), (4.0, 2.0)]
    assert [ratio for _, ratio in found["nobody"]] == [1.0, 1.0]
    with pytest.raises(AssertionError, match="no step was made in a turn of page"):
        ratios(steps[:3], turns)
