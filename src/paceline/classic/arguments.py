"""Checks of arguments: each returns what is wrong, so that all of it is told at once."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from paceline.config.suggest import nearest
from paceline.engines.apply import STRATEGY_NAMES as STRATEGIES
from paceline.engines.precision import PRECISIONS
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


def check_names(given: Iterable[str], known: tuple[str, ...]) -> list[Problem]:
    """Arguments have names that are known."""
    rule = f"the arguments by name are {', '.join(known)}"
    return [
        Problem(what=f"{name} is not an argument", rule=rule, fix=did_you_mean(name, known))
        for name in given
        if name not in known
    ]


def check_type(name: str, value: Any, kind: Any, expected: str) -> list[Problem]:
    """An argument is of a type."""
    if isinstance(value, kind):
        return []
    return [Problem(what=f"{name} is of type {type(value).__name__}", rule=f"it is {expected}")]


def check_strategy(strategy: Any) -> list[Problem]:
    """A strategy is one that ``parallelize`` knows."""
    if strategy in STRATEGIES:
        return []
    rule = f"it is one of {', '.join(STRATEGIES)}"
    return [Problem(what=f"strategy = {strategy!r} is unknown", rule=rule, fix=did_you_mean(strategy, STRATEGIES))]


def check_mixed_precision(precision: Any) -> list[Problem]:
    """Mixed precision is wanted or not, or has the name of a policy."""
    if isinstance(precision, bool) or (isinstance(precision, str) and precision in PRECISIONS):
        return []
    names = tuple(PRECISIONS)
    rule = f"it is True, False, or one of {', '.join(names)}"
    return [Problem(what=f"mixed_precision = {precision!r}", rule=rule, fix=did_you_mean(precision, names))]


def check_cpu_offload(offload: Any, strategy: Any) -> list[Problem]:
    """Offload is a yes or no, and something is sharded that can be kept elsewhere."""
    problems = check_type("cpu_offload", offload, bool, "True or False")
    if not problems and offload and strategy == "ddp":
        rule = "data parallelism keeps whole parameters on the device"
        fix = "use strategy = 'fsdp', which works on one rank too"
        problems.append(Problem(what="cpu_offload = True with strategy = 'ddp'", rule=rule, fix=fix))
    return problems


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
