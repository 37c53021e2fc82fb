"""What the commands of ``paceline bench`` share: words of their options, checks of them, records and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.bench_tables import Rows, show_table
from paceline.cli.destination import check_file
from paceline.errors import UsageError
from paceline.terminal import echo

Output = Annotated[
    Path | None, typer.Option(callback=check_file, help="Also write the record to this file, row after row.")
]
Rounds = Annotated[int | None, typer.Option(help="Rounds in which every arm takes a turn.", min=2)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]
Models = Annotated[str | None, typer.Option(help="Comma-separated: mlp, gpt-11m on a CPU; gpt-124m, gpt-1.1b on CUDA.")]


def check_device(device: str) -> None:
    """Raises UsageError for a device that is not here."""
    import torch

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device} is not here\n  use cpu, or cuda on a machine with a GPU")


def chosen_of(option: str, text: str | None, known: Sequence[str], where: str = "") -> list[str]:
    """Returns the words of an option, or all that there are. Raises UsageError for others."""
    wanted = words_of(text) or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"{option} {','.join(unknown)}: {where}they are {', '.join(known)}")
    return wanted


def numbers_of(option: str, text: str | None) -> list[int]:
    """Returns the numbers of an option such as ``1,2,4``. Raises UsageError for other words."""
    if wrong := [word for word in words_of(text) if not word.isdigit()]:
        raise UsageError(f"{option} {','.join(wrong)}: give whole numbers, with commas between them")
    return [int(word) for word in words_of(text)]


def words_of(text: str | None) -> list[str]:
    """Returns the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def show_record(
    name: str,
    settings: dict[str, Any],
    batches: Iterable[Rows],
    output: Path | None,
    *,
    as_json: bool,
    program: str = "paceline",
    show: Callable[[str, Rows], None] = show_table,
) -> None:
    """Shows the rows of a benchmark as a table, or its record as JSON.

    A file is written after each batch of rows, so that a run that is cut short leaves what it has.
    """
    from paceline.bench.record import BenchRecord

    rows: Rows = []
    record = partial(BenchRecord, name=name, command=typed_command(program, sys.argv), rows=rows, config=settings)
    for batch in batches:
        rows += batch
        if output is not None:
            record().write(output)
    if as_json:
        echo(record().to_json())
    else:
        show(name, rows)


def tell(text: str) -> None:
    """Tells what is measured now."""
    echo(text, err=True)


def typed_command(program: str, argv: list[str]) -> str:
    """Returns the command to repeat a measurement: what was typed, less where the record went."""
    words = argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    return " ".join([program, *words])
