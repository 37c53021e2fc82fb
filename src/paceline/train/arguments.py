"""Checks of arguments: each returns what is wrong, so that all of it is told at once."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from paceline.config.suggest import nearest
from paceline.errors import NotYetError, Problem, UsageError
from paceline.parallel.apply import PLANNED, STRATEGIES


def refuse(who: str, wrong: list[Problem], planned: list[Problem] | None = None) -> None:
    """Raises UsageError with all problems, if there are any; NotYetError if all of them are planned features."""
    problems = wrong + (planned or [])
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    text = f"{who}: {count}\n\n" + "\n\n".join(str(problem) for problem in problems)
    raise UsageError(text) if wrong else NotYetError(text)


def plain_number(value: Any) -> Any:
    """Turns numbers of other libraries, such as numpy's, into Python's; leaves what is no number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def did_you_mean(value: Any, choices: tuple[str, ...]) -> str:
    """Asks for the choice that is most like a value, if one is."""
    near = nearest(value, choices) if isinstance(value, str) else None
    return f"did you mean {near}?" if near else ""


def check_type(name: str, value: Any, kind: Any, expected: str) -> list[Problem]:
    """An argument is of a type."""
    if isinstance(value, kind):
        return []
    return [Problem(what=f"{name} is of type {type(value).__name__}", rule=f"it is {expected}")]


def check_strategy(strategy: Any) -> list[Problem]:
    """A strategy is one that is built, or planned."""
    known = STRATEGIES + PLANNED
    if strategy in known:
        return []
    rule = f"it is one of {', '.join(known)}"
    return [Problem(what=f"strategy = {strategy!r} is unknown", rule=rule, fix=did_you_mean(strategy, known))]


def check_accumulation(steps: Any) -> list[Problem]:
    """A group has at least one microbatch."""
    if type(steps) is int and steps >= 1:
        return []
    rule = "it is a whole number of microbatches, of at least 1"
    fix = "for no accumulation, leave it out"
    return [Problem(what=f"gradient_accumulation_steps = {steps!r}", rule=rule, fix=fix)]


def check_clip(clip: Any) -> list[Problem]:
    """A gradient norm is limited to more than nothing, or not at all."""
    limit = plain_number(clip)
    if clip is None or (type(limit) in (int, float) and limit > 0):
        return []
    rule = "it is the largest global norm of a gradient, a number above 0"
    return [Problem(what=f"gradient_clip_val = {clip!r}", rule=rule, fix="for no clipping, leave it out")]


def planned_strategy(strategy: Any) -> list[Problem]:
    """A strategy is built."""
    if strategy not in PLANNED:
        return []
    built = " or ".join(repr(each) for each in STRATEGIES)
    return [Problem(what=f"strategy = {strategy!r} is not built yet", fix=f"use strategy = {built} for now")]


def planned_feature(name: str, value: Any) -> list[Problem]:
    """A feature to come is not asked for."""
    if not value:
        return []
    return [Problem(what=f"{name} = {value!r} is not built yet", fix="leave it out for now")]
