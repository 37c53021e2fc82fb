"""Judges a number by the usual slips: each slip is a wrong value that a known mistake leads to, and words about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.learn.exercise import Verdict, right, wrong

_FAR = 8.0  # from this factor on, the answer is of another order of magnitude


class Slip(NamedTuple):
    """A wrong value, and what to say to whoever gives it."""

    value: float
    words: str


def judge_number(answer: float, truth: float, slips: Sequence[Slip], *, tolerance: float, words: str) -> Verdict:
    """Compares an answer with the truth, then with the slips; ``tolerance`` is relative, ``words`` are for a right one.

    Where no slip fits, the verdict says only whether the answer is too large or too small.
    """
    if _is_near(answer, truth, tolerance):
        return right(words)
    for slip in slips:
        if _is_near(answer, slip.value, tolerance):
            return wrong(slip.words)
    side = "large" if answer > truth else "small"
    is_far = answer <= 0 or abs(math.log(answer / truth)) > math.log(_FAR)
    return wrong(f"{answer:g} is {'far ' if is_far else ''}too {side}.")


def _is_near(answer: float, value: float, tolerance: float) -> bool:
    return abs(answer - value) <= tolerance * abs(value)
