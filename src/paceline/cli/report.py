"""``paceline report``: what a run left behind, as a table or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def report(
    folder: Path = typer.Argument(help="A run's folder, such as runs/digits."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Show what a run did: quality, speed, communication, and each rank's share.

    Example:  paceline report runs/digits
    """
    from rich.console import Console

    from paceline.records.report import render, summarize, to_json

    summary = summarize(folder)
    if as_json:
        typer.echo(json.dumps(to_json(summary), indent=2))
    else:
        Console().print(render(summary))
