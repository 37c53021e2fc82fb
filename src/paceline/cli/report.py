"""``paceline report``: what runs left behind, in words and tables or as JSON."""

from __future__ import annotations

from pathlib import Path

import typer

from paceline.cli.options import print_json


def report(
    folders: list[Path] = typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/digits."),
    compare: bool = typer.Option(False, "--compare", help="Mark what changed from each run to the next."),
    as_json: bool = typer.Option(False, "--json", help="Print the summaries as JSON."),
) -> None:
    """Show what limited a run, and what it did.

    That is quality, speed, communication and ranks. Of several runs it also shows how speed grows with ranks.

    Examples:

      paceline report runs/digits

      paceline report runs/digits runs/digits-2 --compare
    """
    from itertools import pairwise

    from paceline.records.comparison import compare_runs, draw_comparison, draw_scaling, scaling_of
    from paceline.records.report import render, summarize, to_json
    from paceline.terminal import new_console

    runs = [summarize(folder) for folder in folders]
    points = scaling_of(runs)
    changes = [compare_runs(before, after) for before, after in pairwise(runs)] if compare else []
    if as_json and len(runs) == 1:
        print_json(to_json(runs[0]))
        return
    if as_json:
        from dataclasses import asdict

        more = {"scaling": [asdict(point) for point in points]}
        more |= {"changes": [each.to_json() for each in changes]} if compare else {}
        print_json({"runs": [to_json(run) for run in runs], **more})
        return
    console = new_console()
    for number, run in enumerate(runs if not compare or len(runs) == 1 else []):
        console.print(*([""] if number else []), render(run), sep="\n")
    for part in [*map(draw_comparison, changes), *draw_scaling(points)]:
        console.print("", part, sep="\n")
