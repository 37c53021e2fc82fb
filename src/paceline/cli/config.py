"""``paceline config``: what a config says, where each value comes from, and whether it is sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.config import ExplainRow, LoadedConfig

app = typer.Typer(
    name="config",
    help="Show, explain and check a config, without starting anything.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/digits.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace those of the file.")
]
Ranks = Annotated[
    int | None, typer.Option("--ranks", "-n", min=1, help="The number of ranks, where parallel.ranks is auto.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the whole config as YAML, with overrides and defaults filled in.

    Example: [bold]paceline config show configs/digits.yaml optim.lr=1e-3 > mine.yaml[/bold]
    """
    from paceline.config import dump_yaml

    loaded = _load(config, overrides)
    typer.echo(_to_json(loaded.config.model_dump(mode="json")) if as_json else dump_yaml(loaded.config), nl=as_json)


@app.command()
def explain(config: ConfigPath, overrides: Overrides = None, ranks: Ranks = None, as_json: AsJson = False) -> None:
    """Print every key with its value and its origin: the file and line, an override, a default, or a formula.

    Example: [bold]paceline config explain configs/digits.yaml train.microbatch=8 --ranks 4[/bold]
    """
    from paceline.config import explain as explain_config

    rows = explain_config(_load(config, overrides), ranks)
    if as_json:
        typer.echo(_to_json([{"key": row.key, "value": row.value, "origin": row.origin} for row in rows]))
    else:
        _print_table(rows)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config, for completion and checks in an editor.

    Example: [bold]paceline config schema > paceline.schema.json[/bold], and as the first line of a config
    [bold]# yaml-language-server: $schema=paceline.schema.json[/bold]
    """
    from paceline.config import json_schema

    typer.echo(_to_json(json_schema()))


@app.command()
def check(config: ConfigPath, overrides: Overrides = None, ranks: Ranks = None, as_json: AsJson = False) -> None:
    """Check a config and report every problem at once. Exits with 0 when there is none.

    Example: [bold]paceline config check configs/gpt_pydoc.yaml parallel.ranks=3[/bold]
    """
    from paceline.errors import ConfigError

    try:
        _check(config, overrides, ranks)
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"what": each.what, "rule": each.rule, "fix": each.fix} for each in error.problems]
        typer.echo(_to_json({"source": error.source, "ok": False, "problems": problems}))
        raise typer.Exit(1) from None
    typer.echo(_to_json({"source": str(config), "ok": True, "problems": []}) if as_json else f"{config}: no problems")


def _check(config: Path, overrides: list[str] | None, ranks: int | None) -> None:
    from paceline.config import check_ranks
    from paceline.errors import ConfigError

    loaded = _load(config, overrides)
    problems = check_ranks(loaded.config, ranks) if ranks is not None else []
    if problems:
        raise ConfigError(problems, source=str(config))


def _load(config: Path, overrides: list[str] | None) -> LoadedConfig:
    from paceline.config import load_config_with_sources

    return load_config_with_sources(config, overrides or ())


def _to_json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)


def _print_table(rows: list[ExplainRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"default": "dim", "override": "yellow", "derived": "cyan"}
    table = Table("key", "value", "origin", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        style = styles.get(row.origin.partition(":")[0], "")
        # Text, not str: a value such as [0.9, 0.999] must not be read as markup.
        table.add_row(Text(row.key), Text(_cell(row.value)), Text(row.origin), style=style)
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
