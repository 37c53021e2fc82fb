"""What the commands of ``paceline bench`` share: words of their options, checks of them, records and tables.

A column of a table is written as ``title: template`` (see ``records/event_words.py``), or ``<title: template`` for one
that is aligned to the left. A cell is empty where a value that it names is None or missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.destination import check_file
from paceline.errors import UsageError
from paceline.records.event_words import fill
from paceline.terminal import echo

Rows = list[dict[str, Any]]

RATIO = ("ratio: {ratio:.3f}", "quartiles: {ratio_low:.3f}-{ratio_high:.3f}")
STEPS = (
    *("<model: {model}", "<ranks: {ranks}", "<arm: {arm}", "step: {median_ms:.2f} ms", *RATIO),
    *("<of: {peer}", "items/s: {items_per_s:,.0f}", "peak: {peak_bytes:?B}"),
)
_TABLES: dict[str, tuple[str, ...]] = {
    "engines": STEPS,
    "gpu": (
        *("<model: {model}", "<arm: {arm}", "step: {step_ms:.2f} ms", "ratio: {ratio:.3f}"),
        *("rate: {tokens_per_s:,.0f} tokens/s|{images_per_s:,.0f} images/s", "MFU: {mfu:.1%}", "peak: {peak_bytes:?B}"),
        *("first step: {first_step_s:.1f} s", "again: {second_start_s:.1f} s", "loss: {loss:.4f}"),
        *("of torchao: {fp8_ratio:.3f}", "<not run: {error}"),
    ),
    "scaling": (
        *("<kind: {kind}", "<scaling: {mode}", "<strategy: {strategy}", "ranks: {ranks}", "batch: {global_batch}"),
        *("step: {step_s:S}", "rate: {units_per_s:,.0f} {unit}/s"),
        *("ideal: {ideal:g} x", "speed-up: {speed_up:.2f} x", "efficiency: {efficiency:.1%}"),
        *("communication: {comm_share:.1%}", "memory: {memory_bytes:B}", "<not run: {error}"),
    ),
    "comm": (
        *("<ranks: {ranks}", "<size: {bytes:B}", "<arm: {arm}", "time: {median_us:,.1f} us", "Gbit/s: {gbps:.2f}"),
        "faster than Gloo: {speedup:.2f} x",
    ),
}
_LEGENDS = {
    "gpu": "ratio: to the best plain loop of the same round   MFU: of the bf16 peak   again: at the second start",
    "scaling": "communication: share of a step in which ranks wait for it, or for stages   memory: of the largest rank",
}
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


def show_table(name: str, rows: Rows) -> None:
    """Shows the rows of a benchmark."""
    print_table(rows, _TABLES[name])
    if legend := _LEGENDS.get(name):
        print(legend)


def print_table(rows: Rows, columns: tuple[str, ...]) -> None:
    """Prints rows under the titles of columns, each written as at the top of this file."""
    from rich.table import Table

    from paceline.terminal import new_console

    table = Table(box=None, padding=(0, 2, 0, 0))
    split = [column.partition(": ") for column in columns]
    for title, _, _ in split:
        table.add_column(title.removeprefix("<"), justify="left" if title.startswith("<") else "right")
    for row in rows:
        table.add_row(*(fill(f"[{template}]", row) for _, _, template in split))
    console = new_console()
    if not console.is_terminal:
        console.width = 160  # nobody to fold the lines for
    console.print(table)


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
