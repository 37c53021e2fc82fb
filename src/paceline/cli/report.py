"""``paceline report``: what runs left behind, as tables, JSON, a page, or pictures."""

from __future__ import annotations

from pathlib import Path

import typer

from paceline.cli.options import print_json
from paceline.terminal import echo


def report(
    folders: list[Path] = typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/digits."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON; of several runs, a list."),
    compare: bool = typer.Option(False, "--compare", help="Show several runs side by side, and what differs."),
    html: Path | None = typer.Option(None, "--html", metavar="FILE", help="Write the page of the runs, as one file."),
    png: Path | None = typer.Option(None, "--png", metavar="FILE", help="Draw the charts."),
    svg: Path | None = typer.Option(None, "--svg", metavar="FILE", help="Draw the charts."),
    csv: Path | None = typer.Option(None, "--csv", metavar="FILE", help="Write a line for each step."),
) -> None:
    """Show what runs did: quality, speed, communication, ranks.

    Examples:

      paceline report runs/digits

      paceline report runs/digits runs/digits-2 --compare --html report.html
    """
    from paceline.records.report import render, summarize, to_json
    from paceline.terminal import new_console

    if compare and len(folders) < 2:
        raise typer.BadParameter("--compare needs two runs or more")
    summaries = [summarize(folder) for folder in folders]
    if as_json:
        found = [to_json(summary) for summary in summaries]
        print_json(found[0] if len(found) == 1 else found)
    elif not compare:
        for place, summary in enumerate(summaries):
            new_console().print(*([""] if place else []), render(summary), sep="\n")
    if not (compare or html or png or svg or csv):
        return
    from paceline.view.export import write_csv, write_figure
    from paceline.view.html import write_report
    from paceline.view.runs import read_runs

    runs = read_runs(folders)
    if compare and not as_json:
        from paceline.view.compare import render_compared

        new_console().print(render_compared(runs, summaries))
    if html:
        write_report(folders, html)
    if csv:
        write_csv(runs, csv)
    for path, kind in ((png, "png"), (svg, "svg")):
        if path:
            write_figure(runs, path, kind)
    for path in filter(None, (html, png, svg, csv)):
        echo(f"wrote {path}", err=as_json)
