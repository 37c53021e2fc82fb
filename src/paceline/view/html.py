"""The page as one file: markup, style, code and data, without a request to anywhere.

The live page and a report are the same page. A report has its data inside; the live page asks the server for it. Code
and style are allowed by their hashes alone: nothing that data brings along can run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from paceline import __version__
from paceline.records.report import RunSummary
from paceline.view.document import Window, config_of, describe, differences, heat, timeline
from paceline.view.export import write_file
from paceline.view.runs import ShownRun
from paceline.view.words import summary_of

_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "format.js", "source.js", "chart.js", "heat.js", "timeline.js", "tables.js", "page.js")
_POINTS, _HEAT_POINTS, _HEAT_VALUES = 1500, 600, 40_000  # of a report


def live_page() -> tuple[str, str]:
    """Returns the page that asks the server for data, and the content security policy to send with it."""
    return _page("null", connect="'self'")


def report_page(runs: Sequence[ShownRun], summaries: Sequence[RunSummary] = ()) -> str:
    """Returns the page of finished or running runs with all data inside; ``summaries`` are theirs, where known."""
    return _page(as_json(report_data(runs, summaries)), connect="'none'")[0]


def write_report(runs: Sequence[ShownRun], path: Path, summaries: Sequence[RunSummary] = ()) -> None:
    """Writes the page of runs to a file. Raises RunFolderError where it cannot be written."""
    write_file(path, report_page(runs, summaries).encode())


def report_data(runs: Sequence[ShownRun], summaries: Sequence[RunSummary] = ()) -> dict[str, Any]:
    """Returns what a report shows of runs."""
    shown = [_whole(run, summary) for run, summary in zip_longest(runs, summaries)]
    return {"version": __version__, "runs": shown, "differences": differences_of(runs)}


def differences_of(runs: Sequence[ShownRun]) -> list[tuple[str, list[str]]]:
    """Returns the settings in which runs differ; nothing for a single one."""
    return differences([config_of(run) for run in runs]) if len(runs) > 1 else []


def as_json(value: Any) -> str:
    """Writes values so that they can stand in a script element: no ``<`` can end it, what is not finite is null."""
    text = to_json(value, inf_nan_mode="null").decode()
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _whole(run: ShownRun, summary: RunSummary | None) -> dict[str, Any]:
    told = describe(run, Window(points=_POINTS))
    names = told["heat_names"]
    columns = max(60, min(_HEAT_POINTS, _HEAT_VALUES // max(1, len(run.columns.ranks))))
    steps = run.columns.steps
    last = float(steps[-1]) if len(steps) else 0.0
    first = float(steps[max(0, len(steps) - 8)]) if len(steps) else 0.0
    return told | {
        "words": summary_of(run.folder, summary),
        "heats": {name: heat(run, name, Window(points=columns)) for name in names},
        "timeline": timeline(run, first, last, most=8),
        "config": config_of(run),
    }


def _page(data: str, connect: str) -> tuple[str, str]:
    style, script, index = _assets()
    policy = security_policy(style, script, connect)
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data}
    before = index
    pieces = []
    for name in ("POLICY", "STYLE", "DATA", "SCRIPT"):  # in the order of the file: no part is looked at for marks
        head, _, before = before.partition(f"@{name}@")
        pieces += [head, parts[name]]
    return "".join([*pieces, before]), policy + "; frame-ancestors 'none'"


@cache
def _assets() -> tuple[str, str, str]:
    folder = resources.files("paceline.view") / "page"

    def read(names: Sequence[str]) -> str:
        return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)

    return read(_STYLES), read(_SCRIPTS), (folder / "index.html").read_text(encoding="utf-8")


def security_policy(style: str, script: str, connect: str) -> str:
    """Returns the content security policy of a page: its own style and script alone, by their hashes."""
    allowed = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{allowed[0]}'; style-src 'sha256-{allowed[1]}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )
