"""An option for each field of a ``Layout``: a field that joins the layout is an option by itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from functools import wraps
from typing import Any

import typer

from paceline.plan.layout import Layout
from paceline.plan.rule_case import MEANINGS, WORDS

_KINDS: dict[object, type] = {"bool": bool, "int": int, "float": float}  # any other is written as in a config
_SPELLED = {"accumulate": ("--accumulate", "--microbatches"), "checkpoint_activations": ("--checkpoint-policy",)}


def with_layout_options(without: Collection[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb that takes ``**layout`` an option for each field but ``without``; it gets those that are given."""
    asked = {each.name: each for each in fields(Layout) if each.name not in without}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(verb, eval_str=True)

        @wraps(verb)
        def run(**values: Any) -> None:
            given = {name: value for name, value in values.items() if name not in asked or value is not None}
            verb(**{name: _read(value) if name in asked else value for name, value in given.items()})

        taken = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        run.__signature__ = own.replace(parameters=[*taken, *map(_option, asked.values())])  # type: ignore[attr-defined]
        return run

    return decorate


def _option(field: Field[Any]) -> inspect.Parameter:
    name, kind = field.name, _KINDS.get(field.type, str)
    meaning = re.split("; (?:null|auto):", MEANINGS.get(name, ""))[0]  # a config leaves open what an option says
    words = WORDS.get(name, ())
    listed = f" ({', '.join(words)})" if words and words[-1] not in meaning else ""
    if not meaning.partition(" ")[0].endswith(":"):  # the name of a strategy, for instance, stays as it is written
        meaning = f"{meaning[:1].upper()}{meaning[1:]}"
    option = typer.Option(None, *_SPELLED.get(name, ()), help=f"{meaning}{listed}.")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _read(value: Any) -> Any:
    """Returns the value of an option; one of several types is written as in a config: 2, true, [a, b]."""
    if not isinstance(value, str):
        return value
    from paceline.bounded_yaml import load_yaml

    read = load_yaml(value)
    return tuple(read) if isinstance(read, list) else read
