"""A verb may take its options as one value: the command line has them one by one, in the same places."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    count: int = typer.Option(3, min=1, help="How many.")
    is_loud: bool = typer.Option(False, "--loud", help="Whether it is heard.")


@grouped
def draw(
    name: str = typer.Argument(help="What is drawn."), *, drawn: Drawn, as_json: bool = typer.Option(False, "--json")
) -> None:
    """Draw something."""
    typer.echo(f"{name} {drawn} {as_json}")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["a"], "a Drawn(count=3, is_loud=False) False\n"),
        (["--json", "--loud", "a", "--count", "5"], "a Drawn(count=5, is_loud=True) True\n"),
    ],
)
def test_options_of_a_group_are_given_one_by_one(words: list[str], output: str) -> None:
    app = typer.Typer()
    app.command()(draw)
    assert CliRunner().invoke(app, words).output == output


def test_help_lists_the_options_of_a_group_where_the_group_stands() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(draw)
    text = CliRunner().invoke(app, ["--help"]).output
    assert text.index("What is drawn.") < text.index("--count") < text.index("--loud") < text.index("--json")
    assert CliRunner().invoke(app, ["a", "--count", "0"]).exit_code == 2
