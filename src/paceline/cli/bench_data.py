"""``paceline bench prepare`` and ``paceline bench tokens``: what it takes to make files of tokens and to read them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from paceline.cli.bench_options import AsJson, Output, numbers_of, show_record, tell, words_of
from paceline.cli.destination import check_scratch
from paceline.errors import UsageError


def prepare(
    tokenizers: str = typer.Option("bpe,char,bytes", help="Comma-separated: bpe, char, bytes, or folders."),
    mib: int = typer.Option(64, help="MiB of text: the sources of Python's library, again and again.", min=1),
    rounds: int = typer.Option(3, help="Rounds in which both arms take a turn.", min=1),
    folder: str = typer.Option(
        None, callback=check_scratch, help="Where to write.  [default: where temporary files go]"
    ),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time `paceline data prepare` beside the tokenizer alone.

    Both take all cores. The tokenizer finds the text in memory; the command starts, reads, encodes, hashes and writes.

    Examples:

      paceline bench prepare

      paceline bench prepare --tokenizers ~/models/gpt2 --mib 256 --rounds 5
    """
    from paceline.bench.data import PrepareWorkload, bench_prepare

    wanted = words_of(tokenizers)
    for name in wanted:
        if name not in ("bpe", "char", "bytes") and not (Path(name).expanduser() / "tokenizer.json").is_file():
            raise UsageError(
                f"--tokenizers {name}: no such tokenizer\n  they are bpe, char, bytes, or folders with a tokenizer.json"
            )
    chosen = tuple(name if name in ("bpe", "char", "bytes") else str(Path(name).expanduser()) for name in wanted)
    work = PrepareWorkload(mib=mib, rounds=rounds, tokenizers=chosen, folder=folder)
    settings = {"device": "cpu", **asdict(work)}
    del settings["folder"]
    show_record("prepare", settings, [bench_prepare(work, tell)], output, as_json=as_json)


def tokens(
    model: str = typer.Option("gpt-11m", help="A GPT by its size."),
    batch: int = typer.Option(4, help="Samples of a step.", min=1),
    context: int = typer.Option(128, help="Tokens of a sample.", min=1),
    workers: str = typer.Option("0,1", help="Comma-separated: numbers of loader workers."),
    steps: int = typer.Option(30, help="Steps that are counted, after a few to warm up.", min=2),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure how long a run on prepared tokens waits for its data.

    One rank with one thread trains a GPT on files of tokens.

    Example:  paceline bench tokens --workers 1 --steps 200
    """
    from paceline.bench.data import TokensWorkload, bench_tokens

    counts = tuple(numbers_of("--workers", workers))
    work = TokensWorkload(model=model, batch=batch, context=context, steps=steps, workers=counts)
    show_record("tokens", {"device": "cpu", **asdict(work)}, [bench_tokens(work, tell)], output, as_json=as_json)
