"""What a benchmark prints and writes: its rows as a table, or the record as JSON.

A column of a table is written as ``title: template`` (see ``records/event_words.py``), or ``<title: template`` for one
that is aligned to the left. A cell is empty where a value that it names is None or missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.terminal import echo

Rows = list[dict[str, Any]]

RATIO = ("ratio: {ratio:.3f}", "quartiles: {ratio_low:.3f}-{ratio_high:.3f}")
STEPS = (
    *("<model: {model}", "<ranks: {ranks}", "<arm: {arm}", "step: {median_ms:.2f} ms", *RATIO),
    *("<of: {peer}", "items/s: {items_per_s:,.0f}", "peak: {peak_bytes:?B}"),
)
_TABLES: dict[str, tuple[str, ...]] = {
    "engines": (*STEPS, "exposed: {exposed_ms:.2f} ms", "collectives: {collectives}", "<not run: {error}"),
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


def show_table(name: str, rows: Rows) -> None:
    print_table(rows, _TABLES[name])
    if legend := _LEGENDS.get(name):
        print(legend)


def print_table(rows: Rows, columns: tuple[str, ...]) -> None:
    """Prints rows under the titles of columns, each written as at the top of this file."""
    from rich.table import Table

    from paceline.records.event_words import fill
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
    """Shows rows as a table, or the record as JSON; the file is written after each batch of rows."""
    from paceline_bench.timing import BenchRecord

    rows: Rows = []
    words = sys.argv[1:]
    if "--output" in words:  # the command to repeat a measurement does not say where the record went
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    record = partial(BenchRecord, name=name, command=" ".join([program, *words]), rows=rows, config=settings)
    for batch in batches:
        rows += batch
        if output is not None:
            record().write(output)
    if as_json:
        echo(record().to_json())
    else:
        show(name, rows)
