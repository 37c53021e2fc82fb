"""Arguments and options that several verbs share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from paceline.errors import Problem
from paceline.terminal import echo, new_console

if TYPE_CHECKING:
    from paceline.config import Config, LoadedConfig

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/digits.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace those of the file.")
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", metavar="NAME", help="Such as '4x dgx-h100' or '32x h100-sxm'; see paceline cluster ls."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def tells_for_host() -> bool:
    """Says whether this process tells what every rank of its host finds: it is the first there, or nobody says so.

    A rank that somebody starts by hand has no LOCAL_RANK.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"


def load_and_tell(
    config: Path, overrides: Sequence[str] | None, check: Callable[[Config], Iterable[Problem]] = lambda _: ()
) -> LoadedConfig:
    """Reads a config, and tells on standard error what of the file gave way to an override, as ``train`` does."""
    from paceline.config import load_config_with_sources

    loaded = load_config_with_sources(config, overrides or (), check=check)
    for note in loaded.notes:
        echo(f"paceline: {note}", err=True)
    return loaded


def print_json(value: Any) -> None:
    """Prints plain values as JSON, for programs."""
    echo(json.dumps(value, indent=2, default=str))


@contextlib.contextmanager
def progress_bar(what: str, num_bytes: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Shows a bar of bytes on a terminal while something long is done; yields what hears of bytes that are."""
    if as_json or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=new_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda done: bar.advance(task, done)


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Lets a verb take its options as one value: on the command line, a parameter with a dataclass is its fields."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for each in signature(verb).parameters.values():
        if each.name not in groups:
            parameters.append(each.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[each.name]))
            continue
        types = get_type_hints(groups[each.name], include_extras=True)
        parameters += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            for field in fields(groups[each.name])
        ]

    @wraps(verb)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
