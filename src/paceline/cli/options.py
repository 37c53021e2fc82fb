"""Arguments and options that several verbs share, and what is checked before a verb begins."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.completion import complete_config, complete_override
from paceline.errors import Problem, UsageError, did_you_mean
from paceline.plan.layout import Layout
from paceline.plan.rule_case import MEANINGS, WORDS
from paceline.terminal import echo, new_console

if TYPE_CHECKING:
    from paceline.config import Config, LoadedConfig

ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", autocompletion=complete_config, help="A YAML file, or one that ships: digits."),
]
_VALUES = "Values that replace those of the file."
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", autocompletion=complete_override, help=_VALUES)
]
ClusterName = Annotated[
    str, typer.Option("--cluster", "-c", metavar="NAME", help="Such as '4x dgx-h100'; see paceline cluster ls.")
]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port to serve at; else the first free from 6070 on.")]
IsOpened = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")]
NoMemoryCheck = Annotated[
    bool, typer.Option("--no-memory-check", help="Also start what is estimated to need more memory than there is.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def tells_for_host() -> bool:
    """Says whether this process tells what every rank of its host finds: it is the first there, or nobody says so."""
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


def check_file(path: Path | None) -> Path | None:
    """Returns the path of a file to write into a folder that is there. Raises UsageError where it cannot be written."""
    from paceline.run.folder import find_write_error

    if path is None:
        return None
    why, fix = "", "name a file in a folder that can be written"
    if not path.absolute().parent.is_dir():
        why, fix = f"there is no folder {path.parent}", "make the folder, or name a file in one that is there"
    elif path.is_dir():
        why = "it is a folder"
    elif path.exists():
        why = "" if os.access(path, os.W_OK) else "it is there, and may not be changed"
    elif error := find_write_error(path.parent):
        why = error.strerror or str(error)
    if why:
        raise UsageError(f"{path} cannot be written: {why}\n  what comes out is written there at the end\n  {fix}")
    return path


def _check_for(what: str, *endings: str) -> Callable[[Path | None], Path | None]:

    def check(path: Path | None) -> Path | None:
        if (found := check_file(path)) is not None and found.suffix.lower() not in endings:
            rule = f"its name ends in {', '.join(endings)}"
            raise UsageError(f"{path} is no {what}\n  {rule}\n  try {found.stem}{endings[0]}")
        return found

    return check


check_picture = _check_for("picture", ".png", ".svg", ".pdf")
check_page, check_table = _check_for("page", ".html"), _check_for("table", ".csv")
check_entry = _check_for("entry", ".yaml", ".yml")  # by this ending --cluster takes it for one


def write_output(path: Path, text: str, what: str) -> None:
    """Writes what came out to the file that an option names. Raises UsageError where it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the {what} cannot be written to {path}: {error.strerror}\n  name another file") from error


def check_word(option: str, word: str, known: Sequence[str]) -> None:
    """Raises UsageError for a word that an option does not know."""
    if word not in known:
        fix = did_you_mean(word.lower(), known, "choose one of them", cutoff=0.5)
        raise UsageError(f"{option} {word}: there is none of that name\n  there are {', '.join(known)}\n  {fix}")


_KINDS: dict[object, type] = {"bool": bool, "int": int, "float": float}  # any other is written as in a config
_SPELLED = {
    "context_ranks": ("--context",),
    "accumulate": ("--accumulate", "--microbatches"),
    "checkpoint_activations": ("--checkpoint-policy",),
}


def with_layout_options(without: Collection[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb that takes ``**layout`` an option for each field but ``without``; it gets those that are given."""
    asked = {each.name: each for each in fields(Layout) if each.name not in without}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(verb, eval_str=True)

        @wraps(verb)
        def run(**values: Any) -> None:
            given = {name: value for name, value in values.items() if name not in asked or value is not None}
            verb(**{name: _read_value(value) if name in asked else value for name, value in given.items()})

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


def _read_value(value: Any) -> Any:
    """Returns the value of an option; one of several types is written as in a config: 2, true, [a, b]."""
    if not isinstance(value, str):
        return value
    from paceline.bounded_yaml import load_yaml

    read = load_yaml(value)
    return tuple(read) if isinstance(read, list) else read
