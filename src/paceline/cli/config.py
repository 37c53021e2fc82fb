"""``paceline config`` and ``paceline data``: what a config says and where it comes from; files of tokens from text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.options import AsJson, ConfigPath, Overrides, load_and_tell, print_json
from paceline.errors import ConfigError, Problem, UsageError
from paceline.terminal import echo, new_console
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.config import Config, ExplainRow, LoadedConfig
    from paceline.data.token_files import DataManifest

app = typer.Typer(no_args_is_help=True, help="Show, explain and check a config, without starting anything.")

Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="Ranks, where parallel.ranks is auto.")]
_LADDER = "derived.strategy_ladder"


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the whole config as YAML, with every default."""
    from paceline.config import dump_yaml

    loaded = load_and_tell(config, overrides)
    if as_json:
        print_json(loaded.config.model_dump(mode="json"))
    else:
        echo(dump_yaml(loaded.config), nl=False)


@app.command()
def explain(config: ConfigPath, overrides: Overrides = None, ranks: Ranks = None, as_json: AsJson = False) -> None:
    """Print every key with its value and where that comes from."""
    from paceline.config import explain as explain_config

    loaded = load_and_tell(config, overrides)
    rows = _mesh_rows(loaded, ranks) or explain_config(loaded, ranks) + _estimate_rows(loaded.config, ranks)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    from rich.table import Table
    from rich.text import Text

    styles = {"default": "dim", "override": "yellow", "derived": "cyan"}
    table = Table("key", "value", "origin", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        style = styles.get(row.origin.partition(":")[0], "")
        if row.key != _LADDER:
            # Text, not str: a value such as [0.9, 0.999] must not be read as markup.
            table.add_row(Text(row.key), Text(_cell(row.value)), Text(row.origin), style=style)
    new_console().print(table)
    for row in rows:
        if row.key == _LADDER:
            echo("\n  ".join([f"\n{row.origin.removeprefix('derived: ')}", *row.value]))


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors."""
    from paceline.config.schema import json_schema

    print_json(json_schema())


@app.command()
def check(config: ConfigPath, overrides: Overrides = None, ranks: Ranks = None, as_json: AsJson = False) -> None:
    """Check a config and report every problem at once. Exits with 0 when there is none."""
    from paceline.config import check_ranks
    from paceline.train.reach import find_unreachable, packing_notes

    def find_more(found: Config) -> Iterator[Problem]:
        yield from check_ranks(found, ranks) if ranks is not None else ()
        yield from find_unreachable(found)

    try:
        loaded = load_and_tell(config, overrides, find_more)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"source": error.source, "ok": False, "problems": [asdict(each) for each in error.problems]})
        raise typer.Exit(1) from None
    notes = packing_notes(loaded.config)
    if as_json:
        print_json({"source": str(config), "ok": True, "problems": [], "notes": [*loaded.notes, *notes]})
    else:
        for note in notes:
            echo(note)
        echo(f"{config}: no problems")


@app.command("ls")
def list_configs() -> None:
    """List the configs that come with Paceline, by name."""
    from paceline.config.shipped import shipped_configs

    for name, path in shipped_configs().items():
        about = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        echo(f"{name:<20} {'a model, for --hf' if path.suffix == '.json' else re.split('[.:]( |$)', about)[0]}")


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A config that ships: see paceline config ls.")],
    target: Path = typer.Argument(None, metavar="FILE", callback=options.check_file, help="Else NAME.yaml."),
) -> None:
    """Write a config that comes with Paceline into a new file."""
    from paceline.config.shipped import shipped_configs

    shipped = shipped_configs()
    options.check_word("config copy", name, tuple(shipped))
    file = target or Path(shipped[name].name)
    if file.exists():
        raise UsageError(f"{file} is there\n  a copy replaces nothing\n  name another file")
    options.write_output(file, shipped[name].read_text(encoding="utf-8"), "config")
    echo(f"{file}: a copy of {name}")


@app.command("import")
def import_config(config: ConfigPath) -> None:
    """Translate a config of another framework or script into one of ours."""
    from paceline.config.load import config_from_dict, read_values
    from paceline.config.suggest import translate_config
    from paceline.config.yaml_text import dump_values

    values, notes = translate_config(read_values(config))
    for note in notes:
        echo(note, err=True)
    config_from_dict(values, source=f"{config}, translated")
    echo(dump_values(values), nl=False)


def _mesh_rows(loaded: LoadedConfig, ranks: int | None) -> list[ExplainRow]:
    """Returns all rows of a config that leaves the strategy open, as it is decided; none where that is given."""
    from paceline.config import ExplainRow, LoadedConfig
    from paceline.config import explain as explain_config
    from paceline.config.load import leaf_values
    from paceline.plan.workload import mesh_text
    from paceline.run.decide import decide_strategy, resolve_config
    from paceline.search.automatic import KEY

    config = loaded.config
    known = config.parallel.ranks if ranks is None else ranks
    if not config.is_open or known == "auto":
        return []
    decided, choice = decide_strategy(resolve_config(config.with_values("parallel", ranks=known)))
    assert choice is not None
    kept = {name: getattr(config.parallel, name) for name in ("device", "ranks")}
    settled = decided.with_values("parallel", **kept).with_values("train", precision=config.train.precision)
    before, after = leaf_values(config), leaf_values(settled)
    key, origin = KEY, f"derived: chosen, as {KEY} = auto"
    chosen = {path: value for path, value in after.items() if value != before.get(path)}
    chosen["derived.mesh"] = mesh_text(choice.chosen.layout)
    changed = {path: ExplainRow(key=path, value=value, origin=origin) for path, value in chosen.items()}
    changed[key] = ExplainRow(key=key, value="auto", origin=loaded.sources[key])
    rows = explain_config(LoadedConfig(config=settled, sources=loaded.sources), ranks)
    rows = [changed.pop(row.key, row) for row in rows]
    tried = {each.label: each.rejected or f"fits, {format_bytes(each.memory.device_bytes)}" for each in choice.ladder}
    ladder = [f"{label}: {verdict}" for label, verdict in tried.items()]
    ladder += [f"impossible: {reason}" for reason in choice.left_out]
    chosen_row = ExplainRow(key="derived.strategy", value=choice.chosen.label, origin=f"derived: {choice.reason()}")
    tried_row = ExplainRow(key=_LADDER, value=ladder, origin=f"derived: {KEY} = auto: candidates, the cheapest first")
    return [*rows, *changed.values(), chosen_row, tried_row, *_estimate_rows(decided, known)]


def _estimate_rows(config: Config, ranks: int | None) -> list[ExplainRow]:
    from paceline.config import ExplainRow, layout_of
    from paceline.predict.memory.activations import describe_model
    from paceline.predict.memory.memory import StateFacts, estimate_memory, is_known

    known, device = ranks or config.parallel.ranks, "cuda" if config.parallel.device == "cuda" else "cpu"
    if known == "auto":
        return [ExplainRow(key="derived.memory", value=None, origin="derived: an estimate; give the ranks to see it")]
    model, layout = describe_model(config, device), layout_of(config, known)
    if model is None or not is_known(model, layout):
        who = "a schedule of your own is read when the run starts" if model else "only the model's own code can tell"
        return [ExplainRow(key="derived.memory", value=None, origin=f"derived: {who}")]
    microbatch = 1 if config.train.microbatch == "auto" else layout.microbatch
    layout = replace(layout, microbatch=microbatch)
    need = estimate_memory(model, layout, StateFacts.of(config, device)).to_json()
    total = need.pop("device_bytes")
    parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in need.items() if value)
    which = f"the {device} rank that needs most" if layout.pipeline > 1 else f"a {device} rank"
    formula = f"an estimate for {which} and a microbatch of {microbatch}: {parts}"
    return [ExplainRow(key="derived.memory", value=total, origin=f"derived: {formula}")]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


data_app = typer.Typer(no_args_is_help=True, help="Prepare text as files of tokens, and look at them.")


@data_app.command()
def prepare(
    sources: list[Path] = typer.Argument(metavar="SOURCE...", help="Files or folders: text, .jsonl, .parquet."),
    tokenizer: str = typer.Option(metavar="FOLDER|bytes|char", help="A folder with tokenizer.json, or bytes, or char."),
    output: Path = typer.Option(metavar="DIR", help="A new folder for the tokens."),
    field: str = typer.Option("text", help="Field of JSON lines, or column of parquet, that has the text."),
    workers: int = typer.Option(None, min=1, help="Processes; by default one for each core."),
    on_error: str = typer.Option("stop", metavar="stop|skip", help="What to do with a document that cannot be read."),
    force: bool = typer.Option(False, "--force", help="Replace what is there."),
    as_json: AsJson = False,
) -> None:
    """Encode text once, into files that runs map into memory."""
    from paceline.cluster.detect import usable_cores
    from paceline.data.prepare import PrepareOptions, total_bytes
    from paceline.data.prepare import prepare as run

    options.check_word("--on-error", on_error, ("stop", "skip"))
    if tokenizer == "byte":
        tokenizer = "bytes"
        echo("--tokenizer byte: the word is bytes", err=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # of the processes: each encodes with one core
    workers = workers or len(usable_cores())
    how: dict[str, Any] = {"field": field, "workers": workers, "on_error": on_error, "may_replace": force}
    asked = PrepareOptions(sources=tuple(sources), output=output, tokenizer=tokenizer, **how)
    with options.progress_bar("encoding", total_bytes(asked), as_json) as hear:
        manifest = run(asked, hear)
    if as_json:
        print_json(_facts(manifest))
        return
    skipped = f", {manifest.skipped:,} left out" if manifest.skipped else ""
    echo(f"{manifest.tokens:,} tokens of {manifest.documents:,} documents{skipped} in {output}")
    echo(f"Train on them:  paceline train CONFIG 'data={{kind: tokens, path: {output}}}'")


@data_app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that paceline data prepare has written.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare the hash of every file: reads everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a folder of tokens holds, and whether its files are whole."""
    from paceline.data.token_files import check_shards, open_tokens, read_manifest

    manifest = read_manifest(path)
    check_shards(path, manifest, "full" if verify else "fast")
    facts = _facts(manifest)
    opened = open_tokens(str(path), dtype=None, vocab_size=None, verify="none")
    if opened.tokenizer is not None:
        import numpy as np

        first = opened.tokens.read(np.zeros(1, dtype=np.int64), min(64, len(opened.tokens)))[0].tolist()
        facts["begins"] = opened.tokenizer.decode(first)
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        echo(f"{name:<12} {value:,}" if isinstance(value, int) else f"{name:<12} {value!r}")
    echo(f"{'files':<12} whole, by {'hash' if verify else 'size'}")


def _facts(manifest: DataManifest) -> dict[str, object]:
    names = ("tokens", "documents", "skipped", "vocab_size", "end_token", "dtype", "tokenizer")
    return {**{name: getattr(manifest, name) for name in names}, "shards": len(manifest.shards)}
