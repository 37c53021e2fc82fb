"""What the commands of ``paceline bench`` share: words of their options, checks of them, records and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

Rows = list[dict[str, Any]]


def check_device(device: str) -> None:
    """Raises UsageError for a device that is not here."""
    import torch

    from paceline.errors import UsageError

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device} is not here\n  use cpu, or cuda on a machine with a GPU")


def check_models(wanted: list[str], known: list[str], device: str) -> None:
    """Raises UsageError for models that a benchmark does not have on a device."""
    from paceline.errors import UsageError

    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"--models {','.join(unknown)}: on {device} they are {', '.join(known)}")


def check_parts(wanted: list[str], known: Sequence[str]) -> None:
    """Raises UsageError for parts that a benchmark does not have."""
    from paceline.errors import UsageError

    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"--parts {','.join(unknown)}: they are {', '.join(known)}")


def numbers_of(option: str, text: str | None) -> list[int]:
    """Returns the numbers of an option such as ``1,2,4``. Raises UsageError for other words."""
    from paceline.errors import UsageError

    if wrong := [word for word in words_of(text) if not word.isdigit()]:
        raise UsageError(f"{option} {','.join(wrong)}: give whole numbers, with commas between them")
    return [int(word) for word in words_of(text)]


def words_of(text: str | None) -> list[str]:
    """Returns the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def write_rows(name: str, rows: Rows, config: dict[str, Any], output: Path | None) -> None:
    """Writes the record so far: a run that is cut short leaves what it has."""
    from paceline.bench.record import make_record

    if output is not None:
        make_record(name, typed_command(sys.argv), rows, config).write(output)


def show_rows(name: str, rows: Rows, config: dict[str, Any], show: Callable[[Rows], None] | None) -> None:
    """Shows the rows as a table, or without one prints the record."""
    from paceline.bench.record import make_record

    if show is not None:
        show(rows)
    else:
        typer.echo(make_record(name, typed_command(sys.argv), rows, config).to_json())


def typed_command(argv: list[str]) -> str:
    """Returns the command to repeat a measurement: what was typed, less where the record went."""
    words = argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    return " ".join(["paceline", *words])
