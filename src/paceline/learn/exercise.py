"""An exercise of the course: what it asks for, its hints, and how an answer is checked.

An answer is a value (a number, a word) or a function that the reader wrote. A check calls the function with inputs
of its own, compares with what the library computes, and says in words what is wrong, without giving the answer away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether an answer is right, and why: for a wrong one, what was expected of it and what it gave."""

    is_right: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One exercise. ``number`` is that of its lesson and its place in it, such as "3.2".

    ``asks`` says what to give, in one paragraph. A function is looked for under ``function`` in the reader's file.
    ``check`` may raise whatever the reader's function raises; the caller reports it.
    """

    number: str
    title: str
    asks: str
    answer: Literal["number", "word", "function"]
    function: str = ""
    hints: tuple[str, ...]
    check: Callable[[Any], Verdict]


def right(words: str) -> Verdict:
    """Returns the verdict of a right answer; ``words`` says what follows from it."""
    return Verdict(is_right=True, words=words)


def wrong(words: str) -> Verdict:
    """Returns the verdict of a wrong answer; ``words`` says what does not fit."""
    return Verdict(is_right=False, words=words)
