"""Exercises of lesson 9: right answers pass, and usual mistakes are named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from judged import words_of_wrong

from paceline_course.course import find, judge


def test_9_1_right() -> None:
    assert judge(find("9.1"), 6 * 6.7e9 * 1e12 / (80 * 989e12 * 0.4) / 86_400).is_right
    assert judge(find("9.1"), 14.7).is_right
    assert judge(find("9.1"), 15).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (2.45, "6 FLOPs for each parameter and token"),
        (4.9, "the forward alone"),
        (117.6, "You counted nodes"),
        (5.88, "MFU of 100 %"),
        (2.35, "multiplied by the MFU"),
        (1.27e6, "Those are seconds"),
        (352.8, "Those are hours"),
        (25, "too large"),
    ],
)
def test_9_1_wrong(answer: float, words: str) -> None:
    assert words in words_of_wrong("9.1", answer)


def test_9_2_right() -> None:
    assert judge(find("9.2"), "zero2").is_right
    assert judge(find("9.2"), "zero 2").is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("ddp", "take 234 GB, more than a device has"),
        ("zero1", "take 98 GB, more than a device has"),
        ("fsdp", "not the first"),
        ("zero4", "none of ddp, zero1, zero2, fsdp"),
    ],
)
def test_9_2_wrong(answer: str, words: str) -> None:
    assert words in words_of_wrong("9.2", answer)


def test_9_3_right() -> None:
    assert judge(find("9.3"), lambda save, failure, devices: math.sqrt(2 * save * failure / devices)).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda save, failure, _n: math.sqrt(2 * save * failure), "failures of one device"),
        (lambda save, failure, n: math.sqrt(2 * save * failure * n), "multiplied by the devices"),
        (lambda save, failure, n: math.sqrt(save * failure / n), "square root of 2"),
        (lambda save, failure, n: 2 * save * failure / n, "square of an interval"),
        (lambda _save, failure, n: failure / n, "all work would be lost"),
        (lambda _save, _failure, _n: 3600.0, "another interval loses less"),
        (lambda _save, _failure, _n: None, "returns None"),
    ],
)
def test_9_3_wrong(answer: Callable[[float, float, int], float], words: str) -> None:
    assert words in words_of_wrong("9.3", answer)
