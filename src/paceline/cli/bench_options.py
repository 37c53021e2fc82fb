"""What the commands of ``paceline bench`` share: words of their options, checks of them, records and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.destination import check_record
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.bench.record import BenchRecord

Rows = list[dict[str, Any]]
Output = Annotated[
    Path | None, typer.Option(callback=check_record, help="Also write the record to this file, row after row.")
]
Rounds = Annotated[int | None, typer.Option(help="Rounds in which every arm takes a turn.", min=2)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]


def check_device(device: str) -> None:
    """Raises UsageError for a device that is not here."""
    import torch

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device} is not here\n  use cpu, or cuda on a machine with a GPU")


def check_models(wanted: list[str], known: list[str], device: str) -> None:
    """Raises UsageError for models that a benchmark does not have on a device."""
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"--models {','.join(unknown)}: on {device} they are {', '.join(known)}")


def check_parts(wanted: list[str], known: Sequence[str]) -> None:
    """Raises UsageError for parts that a benchmark does not have."""
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"--parts {','.join(unknown)}: they are {', '.join(known)}")


def numbers_of(option: str, text: str | None) -> list[int]:
    """Returns the numbers of an option such as ``1,2,4``. Raises UsageError for other words."""
    if wrong := [word for word in words_of(text) if not word.isdigit()]:
        raise UsageError(f"{option} {','.join(wrong)}: give whole numbers, with commas between them")
    return [int(word) for word in words_of(text)]


def words_of(text: str | None) -> list[str]:
    """Returns the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


class BenchRows:
    """The rows of a benchmark: written after each addition, so that a run that is cut short leaves what it has."""

    def __init__(self, name: str, settings: dict[str, Any], output: Path | None) -> None:
        self._name, self._settings, self._output = name, settings, output
        self._rows: Rows = []

    def add(self, rows: Rows) -> None:
        """Adds rows, and writes the record so far where the user asked for a file."""
        self._rows += rows
        if self._output is not None:
            self._record().write(self._output)

    def show(self, table: Callable[[Rows], None], *, as_json: bool) -> None:
        """Shows the rows as a table, or prints the record."""
        if as_json:
            typer.echo(self._record().to_json())
        else:
            table(self._rows)

    def _record(self) -> BenchRecord:
        from paceline.bench.record import make_record

        return make_record(self._name, typed_command(sys.argv), self._rows, self._settings)


def tell(text: str) -> None:
    """Tells what is measured now."""
    typer.echo(text, err=True)


def typed_command(argv: list[str]) -> str:
    """Returns the command to repeat a measurement: what was typed, less where the record went."""
    words = argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    return " ".join(["paceline", *words])
