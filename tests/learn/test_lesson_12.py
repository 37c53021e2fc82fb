"""Exercises of lesson 12: right answers pass, and usual mistakes are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from judged import words_of_wrong

from paceline.cluster.costs import Placement, sent_bytes
from paceline_course.course import find, judge


@pytest.mark.parametrize("answer", [1.3804, 1.38, 6 * 70e9 * 2e12 / (989e12 * 0.4 * 0.94) / 3600 * 2.2 / 1e6])
def test_12_1_right(answer: float) -> None:
    assert judge(find("12.1"), answer).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (1.2976, "hours that fail are paid for"),
        (1.2197, "makes the run longer"),
        (0.5522, "MFU of 100 %"),
        (0.2209, "multiplied by the MFU"),
        (0.2301, "counted P D"),
        (0.4601, "the forward alone"),
        (627_450, "Those are hours"),
        (1_380_400, "Those are dollars"),
        (4969, "paid for seconds"),
        (3.0, "too large"),
    ],
)
def test_12_1_wrong(answer: float, words: str) -> None:
    assert words in words_of_wrong("12.1", answer)


def steps_between(p: float, each: float, n: float, bandwidth: float, step_s: float, share: float) -> float:
    return 2 * p * each * (n - 1) / n / bandwidth / (step_s * share)


def test_12_2_right() -> None:
    assert judge(find("12.2"), steps_between).is_right
    exchange = sent_bytes("ring", 14e9, Placement(ranks=3, hosts=3), 0) / 1e9
    assert steps_between(7e9, 2, 3, 1e9, 2.0, 0.5) == pytest.approx(exchange)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *a: steps_between(*a) * a[5], "as long as the exchange"),
        (lambda *a: steps_between(*a) * a[5] ** 2, "multiplied by the share"),
        (lambda *a: steps_between(*a) / a[1], "counted numbers"),
        (lambda *a: steps_between(*a) / 2, "to add and to copy"),
        (lambda *a: steps_between(*a) * a[2] / (a[2] - 1), "keeps the part"),
        (lambda *a: steps_between(*a) * 8, "in bytes already"),
        (lambda *a: steps_between(*a) * a[4], "Those are seconds"),
        (lambda *a: steps_between(*a) * (1 - a[5]), "steps and exchange together"),
        (lambda *a: round(steps_between(*a)), "Write down the seconds"),
        (lambda *_: 500, "Write down the seconds"),
        (lambda *_: None, "returns None"),
    ],
)
def test_12_2_wrong(answer: Callable[..., float], words: str) -> None:
    assert words in words_of_wrong("12.2", answer)


def strided(position: int, batch: int, rank: int, ranks: int) -> list[int]:
    return list(range(position, position + batch))[rank::ranks]


def contiguous(position: int, batch: int, rank: int, ranks: int) -> list[int]:
    return list(range(position + batch * rank // ranks, position + batch * (rank + 1) // ranks))


@pytest.mark.parametrize("answer", [strided, contiguous, lambda p, b, r, n: range(p, p + b)[r::n]])
def test_12_3_right(answer: Callable[[int, int, int, int], list[int]]) -> None:
    verdict = judge(find("12.3"), answer)
    assert verdict.is_right, verdict.words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, b, r, n: strided(p, b // n * n, r, n), "leaves out place"),  # the remainder is dropped
        (lambda p, b, r, n: strided(p, -(-b // n) * n, r, n), "belongs to another step"),  # the remainder is filled up
        (lambda p, b, _r, _n: list(range(p, p + b)), "on two ranks"),  # every rank reads all
        (lambda p, b, r, _n: list(range(p + r * b, p + r * b + b)), "belongs to another step"),  # a batch for each rank
        (lambda _p, b, r, n: strided(0, b, r, n), "place 0, which belongs to another step"),  # begins again
        (lambda p, b, r, n: strided(p // b * b, b, r, n), "belongs to another step"),  # counts in batches, not samples
        (lambda p, b, r, n: strided(p + 1, b, r, n), "belongs to another step"),
        (lambda p, b, r, n: contiguous(p, b, n - 1 - r, n)[1:], "leaves out place"),
        (lambda p, b, r, n: contiguous(p, b // n * n, r, n) + list(range(p + b // n * n, p + b)) * (r == 0), "waits"),
        (lambda p, b, r, n: [float(each) for each in strided(p, b, r, n)], "a list of whole numbers"),
        (lambda *_: None, "a list of whole numbers"),
    ],
)
def test_12_3_wrong(answer: Callable[[int, int, int, int], list[int]], words: str) -> None:
    assert words.replace("waits", "The others wait") in words_of_wrong("12.3", answer)
