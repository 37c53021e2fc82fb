"""The exercises of the course, read from ``exercises.yaml``, and what a check says about an answer.

An answer is a value (a number, a word) or a function that the reader wrote. A number is compared with the formula that
``exercises.yaml`` has for it, and with what usual mistakes come to. A check of a function calls it with inputs of its
own, compares with what the library computes, and names what it found: "right", or a mistake. The exercise has the words
for each, which never give the answer away.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias

from paceline.bounded_yaml import load_yaml

Formula: TypeAlias = str | int | float
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


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


class MistakeError(Exception):
    """What any function may do wrong, whatever the exercise: its words are the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One exercise: its number (lesson.place), what it asks for, and how an answer is judged."""

    number: str
    title: str
    asks: str
    answer: Literal["number", "word", "function"]
    function: str = ""  # that is looked for in a file
    hints: Sequence[str]
    says: Mapping[str, str]
    check: str = ""
    takes: Sequence[str] = ()
    cases: Sequence[Mapping[str, Any]] = ()
    given: Mapping[str, Formula] = field(default_factory=dict)
    truth: Formula = ""
    slips: Mapping[str, Formula | Sequence[Formula]] = field(default_factory=dict)
    tolerance: float = 0.0
    needs: Mapping[str, Formula] = field(default_factory=dict)
    most: float = 0.0

    def verdict(self, said: Said) -> Verdict:
        """Returns what a check found in words. A number without a name is told how far off it is."""
        words = self.says[said.name].format(**said.gaps) if said.name in self.says else said.gaps["far"]
        return Verdict(is_right=said.name == RIGHT.name, words=words)

    def symbols(self, **case: Any) -> dict[str, float]:
        """Returns the numbers of the formulas: those of a case, what is given, and the truth."""
        found = {name: float(each) for name, each in case.items() if not isinstance(each, str)}
        for name, each in self.given.items():
            found[name] = calculate(each, found)
        return found if self.answer == "word" else found | {"truth": calculate(self.truth, found)}


class Lesson(NamedTuple):
    title: str
    exercises: tuple[Exercise, ...]


@cache
def lessons() -> dict[int, Lesson]:
    text = resources.files("paceline_course").joinpath("exercises.yaml").read_text(encoding="utf-8")
    found = [Lesson(each["title"], tuple(Exercise(**one) for one in each["exercises"])) for each in load_yaml(text)]
    return {int(each.exercises[0].number.partition(".")[0]): each for each in found}


def calculate(formula: Formula, symbols: Mapping[str, float]) -> float:
    """Returns what a formula comes to: numbers and symbols with + - * / **, brackets, and min()."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            return min(map(value, node.args))
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        return symbols[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    return float(value(ast.parse(str(formula), mode="eval").body))


def judge_number(exercise: Exercise, answer: float, **case: Any) -> Said:
    """Compares a number with the truth of its exercise, and with what usual mistakes lead to."""
    symbols = exercise.symbols(**case)

    def is_near(formula: Formula) -> bool:
        return math.isclose(answer, calculate(formula, symbols), rel_tol=max(exercise.tolerance, 1e-12))

    if is_near("truth"):
        return RIGHT
    for name, formulas in exercise.slips.items():
        if any(map(is_near, formulas if isinstance(formulas, list) else [formulas])):
            return says(name)
    return says("otherwise", far=_how_far(answer, symbols["truth"]))


def judge_formula(exercise: Exercise, function: Callable[..., Any]) -> Said:
    """Calls a function with what it takes in each case, and compares the numbers that it returns."""
    for case in exercise.cases:
        taken = [case[name] for name in exercise.takes]
        given, call = function(*taken), f"{exercise.function}({', '.join(map(repr, taken))})"
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        said = judge_number(exercise, given, **case) if is_number else says("no_number")
        if said != RIGHT:
            return says(said.name, given=given, call=call)
    return RIGHT


def judge_word(exercise: Exercise, answer: str) -> Said:
    """Compares a word with the right one; a wrong one that the exercise knows gets its own sentence."""
    word = "_".join(answer.replace("-", " ").replace("_", " ").split())
    known = {each.replace("_", ""): each for each in (*exercise.says, str(exercise.truth))}
    word = known.get(word.replace("_", ""), "otherwise")
    return RIGHT if word == exercise.truth else says(word)


def judge_first(exercise: Exercise, answer: str) -> Said:
    """Compares a strategy with the first of the exercise's that needs no more than there is."""
    needs = {name: calculate(formula, exercise.symbols()) for name, formula in exercise.needs.items()}
    word = answer.replace("-", "").replace(" ", "")
    word = {"zero3": "fsdp", "dp": "ddp", "dataparallel": "ddp"}.get(word, word)
    if word not in needs:
        return says("unknown", answer=answer, known=", ".join(needs))
    first = next(name for name, need in needs.items() if need <= exercise.most)
    name = "right" if word == first else "too_large" if needs[word] > exercise.most else "too_late"
    return says(name, answer=word, need=needs[word], device=exercise.most)


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
