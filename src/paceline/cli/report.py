"""``paceline report``: what runs left behind, in words and tables, as JSON, a page, or pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.destination import check_page, check_picture, check_table
from paceline.cli.options import print_json
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.records.report import RunSummary


def report(
    folders: list[Path] = typer.Argument(metavar="RUN", help="Folders of runs, such as runs/digits."),
    compare: bool = typer.Option(False, "--compare", help="Mark what changed from each run to the next."),
    as_json: bool = typer.Option(False, "--json", help="Print the summaries as JSON."),
    html: Path | None = typer.Option(
        None, "--html", metavar="FILE.html", callback=check_page, help="Write the page of the runs, as one file."
    ),
    png: Path | None = typer.Option(None, "--png", metavar="FILE", callback=check_picture, help="Draw the charts."),
    svg: Path | None = typer.Option(None, "--svg", metavar="FILE", callback=check_picture, help="Draw the charts."),
    csv: Path | None = typer.Option(
        None, "--csv", metavar="FILE.csv", callback=check_table, help="Write a line for each step."
    ),
) -> None:
    """Show what limited a run, and what it did.

    That is quality, speed, communication and ranks. Of several runs it also shows how speed grows with ranks.

    Examples:

      paceline report runs/digits

      paceline report runs/digits runs/digits-2 --compare --html report.html
    """
    from dataclasses import asdict
    from itertools import pairwise

    from paceline.records.comparison import compare_runs, draw_comparison, draw_scaling, scaling_of
    from paceline.records.report import render, summarize
    from paceline.terminal import new_console

    if compare and len(folders) < 2:
        raise typer.BadParameter("--compare needs two runs or more")
    summaries = [summarize(folder) for folder in folders]
    points = scaling_of(summaries)
    changes = [compare_runs(before, after) for before, after in pairwise(summaries)] if compare else []
    if as_json and len(summaries) == 1:
        print_json(summaries[0].to_json())
    elif as_json:
        more = {"scaling": [asdict(point) for point in points]}
        more |= {"changes": [each.to_json() for each in changes]} if compare else {}
        print_json({"runs": [run.to_json() for run in summaries], **more})
    else:
        console = new_console()
        for number, run in enumerate([] if compare else summaries):
            console.print(*([""] if number else []), render(run), sep="\n")
        for part in [*map(draw_comparison, changes), *draw_scaling(points)]:
            console.print("", part, sep="\n")
    files = {"html": html, "png": png, "svg": svg, "csv": csv}
    _write_files(summaries, {kind: path for kind, path in files.items() if path}, as_json=as_json)


def _write_files(summaries: list[RunSummary], files: dict[str, Path], *, as_json: bool) -> None:
    """Writes files by their kind, of records that are read once for all of them."""
    if not files:
        return
    from paceline.view.html import write_csv, write_figure, write_report
    from paceline.view.runs import read_runs

    runs = read_runs([summary.folder for summary in summaries])
    for kind, path in files.items():
        if kind == "html":
            write_report(runs, path, summaries)
        elif kind == "csv":
            write_csv(runs, path)
        else:
            write_figure(runs, path, kind)
        echo(f"wrote {path}", err=as_json)
