"""The exercises of the course, read from ``exercises.yaml``, and what a check says about an answer.

An answer is a value (a number, a word) or a function that the reader wrote. A check calls the function with inputs
of its own, compares with what the library computes, and names what it found: "right", or a mistake. The exercise has
the words for each, which never give the answer away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias

from paceline.bounded_yaml import load_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether an answer is right, and why: for a wrong one, what was expected of it and what it gave."""

    is_right: bool
    words: str


class Said(NamedTuple):
    """What a check found, by the name of a sentence of its exercise, and what fills the gaps of the sentence."""

    name: str
    gaps: Mapping[str, Any]


def says(name: str, /, **gaps: Any) -> Said:
    """Returns what a check found: "right", or the name of a mistake."""
    return Said(name, gaps)


RIGHT = says("right")
Mistakes: TypeAlias = dict[str, float | tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One exercise: its number (lesson.place), what it asks for, and the function that is looked for in a file."""

    number: str
    title: str
    asks: str
    answer: Literal["number", "word", "function"]
    function: str = ""
    hints: Sequence[str]
    says: Mapping[str, str]

    def verdict(self, said: Said) -> Verdict:
        """Returns what a check found in words. A number without a name is told how far off it is."""
        words = self.says[said.name].format(**said.gaps) if said.name in self.says else said.gaps["far"]
        return Verdict(is_right=said.name == RIGHT.name, words=words)


class Lesson(NamedTuple):
    """A lesson: its title, and its exercises in order."""

    title: str
    exercises: tuple[Exercise, ...]


@cache
def lessons() -> dict[int, Lesson]:
    """Returns all lessons by number."""
    text = resources.files("paceline.learn").joinpath("exercises.yaml").read_text(encoding="utf-8")
    return {
        number: Lesson(each["title"], tuple(Exercise(**one) for one in each["exercises"]))
        for number, each in enumerate(load_yaml(text), start=1)
    }


def judge_number(
    answer: float, truth: float, mistakes: Mapping[str, float | tuple[float, ...]], tolerance: float = 0.0
) -> Said:
    """Compares a number with the truth, and with what usual mistakes lead to, each within a share of ``tolerance``."""

    def is_near(value: float) -> bool:
        return math.isclose(answer, value, rel_tol=tolerance, abs_tol=1e-12)

    if is_near(truth):
        return RIGHT
    for name, values in mistakes.items():
        if any(map(is_near, values if isinstance(values, tuple) else (values,))):
            return says(name)
    return says("otherwise", far=_how_far(answer, truth))


def judge_first(answer: str, needs: Mapping[str, float], most: float, **gaps: Any) -> Said:
    """Compares a strategy with the first of those in ``needs`` that needs no more than ``most``."""
    word = answer.replace("-", "").replace(" ", "")
    word = {"zero3": "fsdp", "dp": "ddp", "dataparallel": "ddp"}.get(word, word)
    if word not in needs:
        return says("unknown", answer=answer, known=", ".join(needs))
    first = next(name for name, need in needs.items() if need <= most)
    name = "right" if word == first else "too_large" if needs[word] > most else "too_late"
    return says(name, answer=word, need=needs[word], **gaps)


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
