"""``paceline data``: make files of tokens from text, and look at them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import AsJson, print_json, progress_bar
from paceline.errors import UsageError
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.data.token_files import DataManifest

app = typer.Typer(no_args_is_help=True, help="Prepare text as files of tokens, and look at them.")


@app.command()
def prepare(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE...", help="Files or folders: text, .jsonl, .parquet.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="FOLDER|bytes|char", help="A folder with tokenizer.json, or bytes, or char.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the tokens.")],
    field: Annotated[str, typer.Option(help="Field of JSON lines, or column of parquet, that has the text.")] = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one for each core.")] = None,
    on_error: Annotated[
        str, typer.Option(metavar="stop|skip", help="What to do with a document that cannot be read.")
    ] = "stop",
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Encode text once, into files that runs map into memory."""
    from paceline.data.prepare import PrepareOptions, total_bytes
    from paceline.data.prepare import prepare as run

    if on_error not in ("stop", "skip"):
        raise UsageError(f"--on-error {on_error}\n  it is stop or skip")
    if tokenizer == "byte":
        tokenizer = "bytes"
        echo("--tokenizer byte: the word is bytes", err=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # of the processes: each encodes with one core
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options = PrepareOptions(
        sources=tuple(sources),
        output=output,
        tokenizer=tokenizer,
        field=field,
        workers=workers or cores,
        on_error="skip" if on_error == "skip" else "stop",
        may_replace=force,
    )
    with progress_bar("encoding", total_bytes(options), as_json) as hear:
        manifest = run(options, hear)
    if as_json:
        print_json(_facts(manifest))
        return
    skipped = f", {manifest.skipped:,} left out" if manifest.skipped else ""
    echo(f"{manifest.tokens:,} tokens of {manifest.documents:,} documents{skipped} in {output}")
    echo(f"Train on them:  paceline train CONFIG 'data={{kind: tokens, path: {output}}}'")


@app.command()
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
