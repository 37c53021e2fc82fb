"""``paceline report``: what a run left behind, as a table or JSON."""

from __future__ import annotations

from pathlib import Path

import typer

from paceline.cli.options import print_json


def report(
    folder: Path = typer.Argument(help="A run's folder, such as runs/digits."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Show what a run did: quality, speed, communication, ranks.

    Example:  paceline report runs/digits
    """
    from paceline.records.report import render, summarize, to_json
    from paceline.terminal import new_console

    summary = summarize(folder)
    if as_json:
        print_json(to_json(summary))
    else:
        new_console().print(render(summary))
