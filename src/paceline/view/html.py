"""Runs as files: the page with markup, style, code and data in one, and curves as CSV.

The live page and a report are the same page. A report has its data inside; the live page asks the server for it. Code
and style are allowed by their hashes alone: nothing that data brings along can run.

``summary_of(folder)`` is ``paceline report`` as plain values. ``python -m paceline.view.html FOLDER`` prints it as
JSON: the live page has a process of its own read all records again, so that it answers meanwhile.
"""

from __future__ import annotations

import base64
import csv
import gc
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from paceline import __version__
from paceline.errors import PacelineError, RunFolderError
from paceline.records.records import strict_json
from paceline.records.report import COMMUNICATION, RunSummary, headline, plain_tables, summarize
from paceline.records.summary import PHASES
from paceline.search.expectation import Compared
from paceline.units import format_bytes, format_seconds
from paceline.view.document import Window, describe, differences, heat, rounded, timeline
from paceline.view.folder import config_of, row_of, text_of
from paceline.view.runs import ShownRun

_INDEX, _STYLES = ("index.html",), ("uPlot.min.css", "page.css")
_SCRIPTS = (
    *("uPlot.iife.min.js", "format.js", "source.js", "chart.js", "plots.js", "heat.js", "timeline.js"),
    *("tables.js", "runs.js", "texts.js", "page.js"),
)
_POINTS, _HEAT_POINTS, _HEAT_VALUES = 1500, 600, 40_000  # of a report
_COLUMNS = (
    *("epoch", "loss", "lr", "grad_norm", "samples_per_s", "step_s", *PHASES, "host_s", "memory_bytes"),
    *("flops_per_s", "mfu"),
)
_MOST_ROWS = 256  # of a table
_TEXT_BYTES = 2**15  # of each text of a report


def live_page() -> tuple[str, str]:
    """Returns the page that asks the server for data, and the content security policy to send with it."""
    return _page("null", connect="'self'")


def report_page(runs: Sequence[ShownRun], summaries: Sequence[RunSummary] = ()) -> str:
    """Returns the page of finished or running runs with all data inside; ``summaries`` are theirs, where known."""
    shown = [_whole(run, summary) for run, summary in zip_longest(runs, summaries)]
    data = {"version": __version__, "runs": shown, "differences": differences_of(runs)}
    return _page(as_json(data), connect="'none'")[0]


def write_report(runs: Sequence[ShownRun], path: Path, summaries: Sequence[RunSummary] = ()) -> None:
    """Writes the page of runs to a file. Raises RunFolderError where it cannot be written."""
    write_file(path, report_page(runs, summaries).encode())


def differences_of(runs: Sequence[ShownRun]) -> list[tuple[str, list[str]]]:
    """Returns the settings in which runs differ; nothing for a single one."""
    return differences([config_of(run.folder) for run in runs]) if len(runs) > 1 else []


def as_json(value: Any) -> str:
    """Writes values so that they can stand in a script element: no ``<`` can end it, what is not finite is null."""
    text = to_json(value, inf_nan_mode="null").decode()
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _whole(run: ShownRun, summary: RunSummary | None) -> dict[str, Any]:
    told = describe(run, Window(points=_POINTS))
    files = _files(run, told["failure"])
    columns = max(60, min(_HEAT_POINTS, _HEAT_VALUES // max(1, len(run.columns.ranks))))
    first, last = map(float, run.columns.steps[-8:][[0, -1]]) if len(run.columns.steps) else (0.0, 0.0)
    return told | {
        "words": summary_of(run.folder, summary),
        "heats": {name: heat(run, name, Window(points=columns)) for name in told["heat_names"]}
        | {layer: heat(run, layer, Window(points=columns)) for layer in told["expert_layers"]},
        "timeline": timeline(run, first, last, most=8),
        "texts": list(files),
        "files": files,
        "row": row_of(run.folder) | told["state"] | {"id": run.id, "name": run.name},
    }


def _files(run: ShownRun, failure: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the texts that a report has: the config, the log of the run, and that of the rank that failed."""
    names, found = ["config", "run", *([f"rank-{failure['rank']}"] if failure else [])], {}
    for name in names:
        with suppress(KeyError):
            found[name] = text_of(run.folder, name, _TEXT_BYTES)
    return found


def _page(data: str, connect: str) -> tuple[str, str]:
    style, script, index = _assets()
    policy = security_policy(style, script, connect)
    pieces = []  # in the order of the file: no part is looked at for marks
    for name, part in {"POLICY": policy, "STYLE": style, "DATA": data, "SCRIPT": script}.items():
        head, _, index = index.partition(f"@{name}@")
        pieces += [head, part]
    return "".join([*pieces, index]), policy + "; frame-ancestors 'none'"


@cache
def _assets() -> tuple[str, str, str]:
    folder = resources.files("paceline.view") / "page"
    parts = [[(folder / name).read_text(encoding="utf-8") for name in names] for names in (_STYLES, _SCRIPTS, _INDEX)]
    style, script, index = map("\n".join, parts)
    return style, script, index


def security_policy(style: str, script: str, connect: str) -> str:
    """Returns the content security policy of a page: its own style and script alone, by their hashes."""
    allowed = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    policy = f"default-src 'none'; script-src 'sha256-{allowed[0]}'; style-src 'sha256-{allowed[1]}'; "
    return policy + f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"


def write_csv(runs: Sequence[ShownRun], path: Path) -> None:
    """Writes a line for each step of each run: what all ranks did together, in the units of the records."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["run", "step", "time", *_COLUMNS])
    for run in runs:
        curves = run.columns.curves()
        values = [rounded(curves[name], 7) for name in _COLUMNS]
        for step, time, *row in zip(run.columns.steps, curves["time"], *values, strict=True):
            # A name that a spreadsheet would take for a formula is marked as text.
            name = f"'{run.name}" if run.name[:1] in "=+-@" else run.name
            cells = ["" if value != value else repr(value) for value in row]
            lines.writerow([name, int(step), f"{time:.3f}", *cells])
    write_file(path, text.getvalue().encode())


def write_file(path: Path, content: bytes) -> None:
    """Writes a file, and the folder that it lies in. Raises RunFolderError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        why = f"cannot write {path}: {error.strerror or error}"
        raise RunFolderError(f"{why}\n  give a file in a folder that can be written") from error


def summary_of(folder: Path, summary: RunSummary | None = None) -> dict[str, Any]:
    """Returns what there is to say about a run, read again without a ``summary``; its ``problem`` where that fails."""
    try:
        summary = summary or summarize(folder)
    except PacelineError as error:
        return {"problem": str(error)}
    sentences = [{"kind": kind, "text": text} for kind, text in _sentences(summary)]
    told = {"sentences": sentences, "facts": [list(row) for row in headline(summary)]}
    return told | {"tables": list(_tables(summary)), "summary": summary.to_json()}


def _sentences(summary: RunSummary) -> Iterable[tuple[str, str]]:
    """Yields what is to be said, by kind: what went wrong, the verdict, its evidence, advice, what was predicted."""
    limits = summary.limits
    if summary.status == "failed" and summary.message:
        yield "bad", summary.message.partition("\n")[0]
    late = summary.late if summary.straggler is None else (str(summary.straggler),)
    told = [line.strip() for line in limits.lines()] if limits.found else []
    yield from (("warning", line) for line in late if line not in told)
    for wrong in summary.experts_wrong:
        yield "warning", str(wrong)
        yield "advice", wrong.advice
    if limits.sentence:
        yield "good" if limits.what == "compute" else "warning" if limits.found else "evidence", limits.sentence
    yield from (("evidence", line) for line in limits.evidence)
    yield from (("evidence", f"also {limit}") for limit in limits.found[1:])
    yield from (("advice", str(change)) for change in limits.changes)
    if summary.prediction is not None:
        yield from (("prediction", line) for line in summary.prediction.lines())


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
    gc.disable()  # records are many and have no cycles: the collector would look at all of them again and again
    sys.stdout.write(json.dumps(strict_json(summary_of(Path(sys.argv[1])))))
