"""Arguments and options that several verbs share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import Problem
from paceline.terminal import echo

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
