"""What a run did in words and tables, for the top of the page: ``paceline report`` as plain values.

    summary_of(folder)   {"sentences", "facts", "tables", "summary"}; {"problem"} where the records cannot be summed up

``python -m paceline.view.words FOLDER`` prints it as JSON: the live page has a process of its own read all records
again, so that it answers meanwhile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.records.console import format_loss, format_percent
from paceline.records.records import strict_json
from paceline.records.report import RunSummary, summarize, to_json
from paceline.records.summary import PHASES
from paceline.records.tables import plain_tables
from paceline.search.expectation import Compared
from paceline.units import format_bytes, format_count, format_flops, format_seconds

_MOST_RANKS = 256  # of a table


def summary_of(folder: Path, summary: RunSummary | None = None) -> dict[str, Any]:
    """Returns what there is to say about a run; a sentence under ``problem`` where its records cannot be read.

    They are not read again where the caller has a ``summary`` of them.
    """
    try:
        summary = summary or summarize(folder)
    except PacelineError as error:
        return {"problem": str(error)}
    return {
        "sentences": [{"kind": kind, "text": text} for kind, text in _sentences(summary)],
        "facts": [[name, value, note] for name, value, note in _facts(summary)],
        "tables": list(_tables(summary)),
        "summary": to_json(summary),
    }


def _sentences(summary: RunSummary) -> Iterable[tuple[str, str]]:
    if summary.status == "failed" and summary.message:
        yield "bad", summary.message.partition("\n")[0]
    limits = [line.strip() for line in summary.limits.lines()] if summary.limits.found else []
    late = summary.late if summary.straggler is None else (str(summary.straggler),)
    yield from (("warning", line) for line in late if line not in limits)
    kinds = ("good" if summary.limits.what == "compute" else "warning", "note")
    yield from ((kinds[place > 0], line) for place, line in enumerate(limits))
    if summary.prediction is not None:
        yield from (("note", line) for line in summary.prediction.lines())


def _facts(summary: RunSummary) -> Iterable[tuple[str, str, str]]:
    if summary.test_accuracy is not None:
        yield "test accuracy", format_percent(summary.test_accuracy), ""
    if summary.test_loss is not None:
        yield "test loss", format_loss(summary.test_loss), ""
    yield from ((f"test {name}", format_loss(value), "") for name, value in summary.test_metrics.items())
    if summary.final_loss is not None:
        yield "training loss", format_loss(summary.final_loss), "the last steps"
    if summary.units_per_s is not None:
        yield f"{summary.unit}/s", f"{summary.units_per_s:,.0f}", "all ranks, median step"
    if summary.mfu is not None and summary.peak_flops is not None:
        yield "MFU", format_percent(summary.mfu), f"of {format_flops(summary.peak_flops)} a device"
    elif summary.flops_per_s is not None:
        yield "model FLOP/s", format_flops(summary.flops_per_s), "forward and backward"
    if summary.steps:
        yield "exposed communication", format_percent(summary.comm_share), "of step time"
    memory = max((rank.memory_bytes for rank in summary.ranks), default=0)
    if memory:
        yield "memory", format_bytes(memory), "peak of a rank"
    yield "duration", format_seconds(summary.seconds), f"{summary.steps:,} steps"


def _tables(summary: RunSummary) -> Iterable[dict[str, Any]]:
    if not summary.steps:
        return
    names = ("data", "forward", "backward", "comm", "update")
    rows = [
        [
            str(rank.rank),
            rank.device.removeprefix("NVIDIA "),
            rank.host,
            format_count(rank.samples),
            format_seconds(rank.step_s),
            *(f"{100 * getattr(rank, name) / rank.total_s:.1f} %" if rank.total_s > 0 else "-" for name in PHASES),
            format_bytes(rank.memory_bytes),
        ]
        for rank in summary.ranks[:_MOST_RANKS]
    ]
    note = "step: median; data to update: share of step time; comm: waiting for other ranks"
    if len(summary.ranks) > _MOST_RANKS:
        note += f"; the first {_MOST_RANKS} of {len(summary.ranks):,} ranks"
    columns = ["rank", "device", "host", "samples", "step", *names, "memory"]
    yield {"title": "What each rank did", "columns": columns, "rows": rows, "note": note}
    # The page has a table of communication of its own, which follows the run.
    for table in plain_tables(summary.ranks, (), summary.goodput, summary.memory):
        yield {"title": table.title, "columns": table.columns, "rows": table.rows, "note": ""}
    if summary.prediction is not None and (rows := _predicted(summary.prediction)):
        columns = ["", "predicted", "measured", "measured / predicted"]
        yield {"title": "Predicted and measured", "columns": columns, "rows": rows, "note": ""}


def _predicted(found: Compared) -> list[list[str]]:
    rows, when = [], ", predicted while it ran" if found.predicted.is_later else ""
    if found.predicted.step_s is not None and found.measured_step_s is not None and found.step_ratio is not None:
        times = (format_seconds(found.predicted.step_s), format_seconds(found.measured_step_s))
        rows.append([f"step{when}", *times, f"{found.step_ratio:.2f}"])
    memory = found.predicted.memory_bytes
    if memory is not None and found.measured_memory_bytes is not None and found.memory_ratio is not None:
        sizes = (format_bytes(memory), format_bytes(found.measured_memory_bytes))
        rows.append([f"memory a rank{when}", *sizes, f"{found.memory_ratio:.2f}"])
    return rows + [row for each in found.later() for row in _predicted(each)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(strict_json(summary_of(Path(sys.argv[1])))))
