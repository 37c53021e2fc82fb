"""Judges an answer that is a number: right, a mistake that has a name, or how far off it is.

A mistake is the value that somebody gets who makes it, with the words that help. The words never hold the right value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.learn.exercise import Verdict, right, wrong


@dataclass(frozen=True, slots=True)
class Mistake:
    """A usual mistake: the number that it leads to, and what to say to somebody who gives it."""

    value: float
    words: str


def judge_number(
    answer: float, truth: float, mistakes: Sequence[Mistake], *, praise: str, tolerance: float = 0.01
) -> Verdict:
    """Compares a number with the truth, and with the mistakes, each within a share of ``tolerance``."""
    number = _as_number(answer)
    if number is None:
        return wrong(f"{answer!r} is not a number: give one such as 12.5.")
    if _is_near(number, truth, tolerance):
        return right(praise)
    for mistake in mistakes:
        if _is_near(number, mistake.value, tolerance):
            return wrong(mistake.words)
    return wrong(_how_far(number, truth))


def _as_number(answer: object) -> float | None:
    try:
        number = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _is_near(number: float, value: float, tolerance: float) -> bool:
    return math.isclose(number, value, rel_tol=tolerance, abs_tol=1e-12)


def _how_far(number: float, truth: float) -> str:
    """Says on which side an answer is, and roughly how far, without the value itself."""
    if number <= 0:
        return f"{number:g} cannot be: the answer is above 0."
    share = max(number / truth, truth / number)
    side = "too large" if number > truth else "too small"
    if share > 1e6:
        return f"{number:g} is {side}, by more than a million: look at the unit that the exercise asks for."
    for factor in (2, 4, 8, 1000):
        if math.isclose(share, factor, rel_tol=0.03):
            return f"{number:g} is {side}, by a factor of {factor}."
    far = "a little" if share < 1.2 else "less than ten times" if share < 10 else "more than ten times"
    return f"{number:g} is {side}, by {far}."
