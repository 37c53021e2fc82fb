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
from paceline.records.records import strict_json
from paceline.records.report import RunSummary, summarize, to_json
from paceline.records.tables import COMMUNICATION, headline, plain_tables
from paceline.search.expectation import Compared
from paceline.units import format_bytes, format_seconds

_MOST_ROWS = 256  # of a table


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
        "facts": [list(row) for row in headline(summary)],
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


def _tables(summary: RunSummary) -> Iterable[dict[str, Any]]:
    for table in plain_tables(summary) if summary.steps else ():
        rows, note = table.rows[:_MOST_ROWS], table.note
        if len(rows) < len(table.rows):
            note += f"\nthe first {_MOST_ROWS} of {len(table.rows):,}"
        if table.title != COMMUNICATION:  # the page has a table of its own, which follows the run
            yield {"title": table.title, "columns": table.columns, "rows": rows, "note": note}
    if summary.prediction is not None and (found := _predicted(summary.prediction)):
        columns = ["", "predicted", "measured", "measured / predicted"]
        yield {"title": "predicted and measured", "columns": columns, "rows": found, "note": ""}


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
