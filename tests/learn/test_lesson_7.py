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


def in_flight(schedule: str, p: int, k: int, rank: int) -> int:
    return k if schedule == "gpipe" else min(k, p - rank)


def test_7_2_right() -> None:
    assert judge(find("7.2"), in_flight).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda _s, p, _m, r: p - r, "Under GPipe"),
        (lambda s, p, k, r: k if s == "gpipe" else p - r, "there are fewer microbatches"),
        (lambda s, _p, k, r: k if s == "gpipe" else min(k, r + 1), "upside down"),
        (lambda s, p, k, _r: k if s == "gpipe" else min(k, p), "Only rank 0"),
        (lambda s, p, k, r: k if s == "gpipe" else min(k, p - 1 - r), "One more is in flight"),
        (lambda s, _p, k, _r: k if s == "gpipe" else 7, "Count the ranks"),
        (lambda _s, _p, _m, _r: None, "returns None"),
    ],
)
def test_7_2_wrong(answer: Callable[[str, int, int, int], int], words: str) -> None:
    assert words in words_of_wrong("7.2", answer)


def row(p: int, k: int, rank: int, first: int | None = None) -> list[str]:
    """1F1B with so many forwards first; None: as it should be."""
    first = min(k, p - 1 - rank if first is None else first)
    done = [f"F{each}" for each in range(first)]
    for each in range(k - first):
        done += [f"F{first + each}", f"B{each}"]
    return done + [f"B{each}" for each in range(k - first, k)]


def unlimited_row(p: int, k: int, rank: int) -> list[str]:
    """1F1B by somebody who forgot that k may be less than the forwards of the first part."""
    first = p - 1 - rank
    done = [f"F{each}" for each in range(first)]
    for each in range(k - first):
        done += [f"F{first + each}", f"B{each}"]
    return done + [f"B{each}" for each in range(max(0, k - first), k)]


def test_7_3_right() -> None:
    assert judge(find("7.3"), row).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, k, r: row(p, k, r, k), "it would be GPipe"),
        (lambda p, k, r: row(p, k, r, 0), "too few forwards first"),
        (lambda p, k, r: row(p, k, r)[:-1], "B0.3"),
        (lambda p, k, r: row(p, k, r)[::-1], "B0.3 comes before F0.3"),
        (lambda p, k, r: row(p, k, r)[::-1], "B1.0 is B0 in the row of rank 1"),
        (lambda p, k, r: unlimited_row(p, k, r), "p = 5, k = 2"),
        (lambda _p, _m, _r: "F0 B0", "a row is a list of texts"),
        (lambda _p, _m, _r: ["X0"], "an action is F or B"),
        (lambda p, k, r: row(p, k, r, r), "deadlocks"),
    ],
)
def test_7_3_wrong(answer: Callable[[int, int, int], list[str]], words: str) -> None:
    assert words in words_of_wrong("7.3", answer)
