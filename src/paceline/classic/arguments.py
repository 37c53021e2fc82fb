"""Checks of arguments: each returns what is wrong, so that all of it is told at once."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from paceline.config.suggest import nearest
from paceline.errors import Problem, UsageError


def refuse(who: str, problems: list[Problem]) -> None:
    """Raises UsageError with all problems, if there are any."""
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise UsageError(f"{who}: {count}\n\n" + "\n\n".join(str(problem) for problem in problems))


def plain_number(value: Any) -> Any:
    """Turns numbers of other libraries, such as numpy's, into Python's; leaves what is no number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def did_you_mean(value: Any, choices: tuple[str, ...]) -> str:
    """Asks for the choice that is most like a value, if one is."""
    near = nearest(value, choices) if isinstance(value, str) else None
    return f"did you mean {near}?" if near else ""


def expect(is_fine: bool, what: str, rule: str, fix: str = "") -> list[Problem]:
    """Returns a problem unless something is fine."""
    return [] if is_fine else [Problem(what=what, rule=rule, fix=fix)]


def check_names(given: Iterable[str], known: tuple[str, ...]) -> list[Problem]:
    """Arguments have names that are known."""
    rule, unknown = f"the arguments by name are {', '.join(known)}", [name for name in given if name not in known]
    return [Problem(what=f"{name} is not an argument", rule=rule, fix=did_you_mean(name, known)) for name in unknown]


def check_type(name: str, value: Any, kind: Any, expected: str) -> list[Problem]:
    return expect(isinstance(value, kind), f"{name} is of type {type(value).__name__}", f"it is {expected}")


def check_choice(name: str, value: Any, choices: tuple[str, ...], *, also: str = "", says: str = "") -> list[Problem]:
    """An argument is one of some words; ``also`` is what else it may be, ``says`` what is said of another value."""
    rule = f"it is {also}one of {', '.join(choices)}"
    is_known = isinstance(value, str) and value in choices
    return expect(is_known, f"{name} = {value!r} {says}".rstrip(), rule, did_you_mean(value, choices))
