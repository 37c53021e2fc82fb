"""Exercises of lesson 8: right answers pass, and usual mistakes are named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from judged import words_of_wrong

from paceline_course.course import find, judge


def test_8_1_right() -> None:
    assert judge(find("8.1"), 100 * 6 * 6.7e9 * 1_048_576 / (12.9 * 8 * 989e12)).is_right
    assert judge(find("8.1"), 41.3).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (0.413, "multiply it by 100"),
        (13.8, "the forward alone"),
        (20.65, "a multiplication and an addition"),
        (55.1, "computed again"),
        (330, "There are 8"),
        (47.4, "too large"),
        (3, "too small, by more than ten times"),
    ],
)
def test_8_1_wrong(answer: float, words: str) -> None:
    assert words in words_of_wrong("8.1", answer)


def spacing(x: float, bits: int = 8) -> float:
    return 2.0 ** (math.floor(math.log2(x)) - bits + 1)


def test_8_2_right() -> None:
    assert judge(find("8.2"), lambda w, u: u > spacing(w) / 2).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda w, u: u >= spacing(w), "twice the right one"),
        (lambda _w, u: u > 2**-8, "the same for all weights"),
        (lambda w, u: u > w / 256, "a share of the weight"),
        (lambda w, u: u > spacing(w, 9) / 2, "half of the right one"),
        (lambda w, u: u > spacing(w, 7) / 2, "twice the right one"),
        (lambda w, u: u > spacing(w, 11) / 2, "the limit of fp16"),
        (lambda w, u: w + u != w, "64 bits"),
        (lambda _w, _u: True, "returns True for all updates"),
        (lambda _w, _u: False, "torch's bf16 says True"),
        (lambda _w, _u: None, "returns None"),
        (lambda w, u: w + u, "It should return True or False"),
    ],
)
def test_8_2_wrong(answer: Callable[[float, float], bool], words: str) -> None:
    assert words in words_of_wrong("8.2", answer)


def test_8_3_right() -> None:
    assert judge(find("8.3"), 1181).is_right
    assert judge(find("8.3"), 2 * 1979e12 / 3.35e12).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (1772, "2 bytes for each number"),
        (886, "1 byte for each number"),
        (590.7, "three matrices move"),
        (2363, "2 d^3 FLOPs"),
        (20, "too small, by more than ten times"),
    ],
)
def test_8_3_wrong(answer: float, words: str) -> None:
    assert words in words_of_wrong("8.3", answer)
