"""Arguments and options that several verbs share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.terminal import echo

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


def print_json(value: Any) -> None:
    """Prints plain values as JSON, for programs."""
    echo(json.dumps(value, indent=2, default=str))
