"""What the checks of exercises say of an answer: tests compare the words, and see which verdict they belong to."""

from __future__ import annotations

from typing import Any

from paceline_course.course import find, judge


def words_of_right(number: str, answer: Any) -> str:
    """Returns what a check says of an answer that it must take."""
    verdict = judge(find(number), answer)
    assert verdict.is_right, f"{number} refuses {answer!r}: {verdict.words}"
    return verdict.words


def words_of_wrong(number: str, answer: Any) -> str:
    """Returns what a check says of an answer that it must not take."""
    verdict = judge(find(number), answer)
    assert not verdict.is_right, f"{number} takes {answer!r}: {verdict.words}"
    return verdict.words
