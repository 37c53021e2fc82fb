"""Exercises of lesson 7: right answers pass, and usual mistakes are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from judged import words_of_wrong

from paceline_course.course import find, judge


def test_7_1_right() -> None:
    assert judge(find("7.1"), 133).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (140, "share of the whole step"),
        (152, "one stage too many"),
        (132, "just above 5 %"),
        (9, "too small, by more than ten times"),
        (150, "too large"),
    ],
)
def test_7_1_wrong(answer: int, words: str) -> None:
    verdict = judge(find("7.1"), answer)
    assert not verdict.is_right
    assert words in verdict.words
    assert "133" not in verdict.words


def in_flight(schedule: str, p: int, m: int, rank: int) -> int:
    return m if schedule == "gpipe" else min(m, p - rank)


def test_7_2_right() -> None:
    assert judge(find("7.2"), in_flight).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda _s, p, _m, r: p - r, "Under GPipe"),
        (lambda s, p, m, r: m if s == "gpipe" else p - r, "there are fewer microbatches"),
        (lambda s, _p, m, r: m if s == "gpipe" else min(m, r + 1), "upside down"),
        (lambda s, p, m, _r: m if s == "gpipe" else min(m, p), "Only rank 0"),
        (lambda s, p, m, r: m if s == "gpipe" else min(m, p - 1 - r), "One more is in flight"),
        (lambda s, _p, m, _r: m if s == "gpipe" else 7, "Count the ranks"),
        (lambda _s, _p, _m, _r: None, "returns None"),
    ],
)
def test_7_2_wrong(answer: Callable[[str, int, int, int], int], words: str) -> None:
    assert words in words_of_wrong("7.2", answer)


def row(p: int, m: int, rank: int, first: int | None = None) -> list[str]:
    """1F1B with so many forwards first; None: as it should be."""
    first = min(m, p - 1 - rank if first is None else first)
    done = [f"F{each}" for each in range(first)]
    for each in range(m - first):
        done += [f"F{first + each}", f"B{each}"]
    return done + [f"B{each}" for each in range(m - first, m)]


def unlimited_row(p: int, m: int, rank: int) -> list[str]:
    """1F1B by somebody who forgot that m may be less than the forwards of the first part."""
    first = p - 1 - rank
    done = [f"F{each}" for each in range(first)]
    for each in range(m - first):
        done += [f"F{first + each}", f"B{each}"]
    return done + [f"B{each}" for each in range(max(0, m - first), m)]


def test_7_3_right() -> None:
    assert judge(find("7.3"), row).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, m, r: row(p, m, r, m), "it would be GPipe"),
        (lambda p, m, r: row(p, m, r, 0), "too few forwards first"),
        (lambda p, m, r: row(p, m, r)[:-1], "B0.3"),
        (lambda p, m, r: row(p, m, r)[::-1], "B0.3 comes before F0.3"),
        (lambda p, m, r: row(p, m, r)[::-1], "B1.0 is B0 in the row of rank 1"),
        (lambda p, m, r: unlimited_row(p, m, r), "p = 5, m = 2"),
        (lambda _p, _m, _r: "F0 B0", "a row is a list of texts"),
        (lambda _p, _m, _r: ["X0"], "an action is F or B"),
        (lambda p, m, r: row(p, m, r, r), "deadlocks"),
    ],
)
def test_7_3_wrong(answer: Callable[[int, int, int], list[str]], words: str) -> None:
    assert words in words_of_wrong("7.3", answer)
