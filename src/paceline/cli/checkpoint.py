"""``paceline checkpoint``: look at checkpoints, verify and compare them, and carry them to other worlds and formats.

Nothing here needs the model's code or a GPU, and memory stays at some windows of 8 MiB.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from paceline.cli import checkpoint_text as text
from paceline.cli.options import grouped, progress_bar
from paceline.errors import UsageError, did_you_mean
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.checkpoint.tools.outgoing import Format
    from paceline.plan.layout import Strategy

app = typer.Typer(no_args_is_help=True, help="List, verify, compare, reshard and convert checkpoints.")

_JSON = typer.Option(False, "--json", help="Print it as JSON.")
_FAST = typer.Option(False, "--fast", help="Compare the sizes of the source's files, not their hashes, before.")
_SOURCE = typer.Argument(metavar="SRC", help="A checkpoint, run, folder or URL.")
_FORCE = typer.Option(False, "--force", help="Replace what is there.")
_PATH = typer.Argument(metavar="PATH", help="A checkpoint; of a run or folder, the newest whole one. URLs work, too.")


@app.command("ls")
def list_all(
    where: str = typer.Argument(metavar="RUN|FOLDER", help="A run's folder, one with checkpoints, or a URL."),
    full: bool = typer.Option(False, "--full", help="Compare the hash of every file, too: reads everything."),
    as_json: bool = _JSON,
) -> None:
    """List the checkpoints of a run, and whether they are whole."""
    from paceline.checkpoint.tools.listing import list_folder

    with _reading(), progress_bar("reading", None, as_json) as tell:
        found = list_folder(Path(where), time.time(), "full" if full else "fast", tell)
    text.show_list(found, as_json=as_json)
    if any(each.problem for each in found):
        raise typer.Exit(1)


@app.command()
def inspect(
    path: str = _PATH,
    tensors: str = typer.Option(None, metavar="PATTERN", help="List tensors whose names fit: '*' is any text."),
    as_json: bool = _JSON,
) -> None:
    """Say in words what a checkpoint holds. Reads its manifest alone."""
    from paceline.checkpoint.tools.listing import summarize

    with _reading():
        found = summarize(find_any(path), tensors)
    text.show_summary(found, lists_tensors=tensors is not None, as_json=as_json)


@app.command()
def verify(
    path: str = _PATH,
    fast: bool = typer.Option(False, "--fast", help="Compare sizes instead of hashes: reads no tensor."),
    as_json: bool = _JSON,
) -> None:
    """Verify a checkpoint: files, tensors, samples consumed."""
    from paceline.checkpoint import read_manifest
    from paceline.checkpoint.tools.audit import audit

    with _reading():
        chosen = find_any(path)
        with progress_bar("verifying", read_manifest(chosen).num_bytes, as_json) as tell:
            found = audit(chosen, "fast" if fast else "full", tell)
    text.show_audit(found, as_json=as_json)
    if not found.is_good:
        raise typer.Exit(1)


@app.command()
def diff(
    left: str = typer.Argument(metavar="A", help="A checkpoint, run, folder or URL."),
    right: str = typer.Argument(metavar="B", help="Another one."),
    as_json: bool = _JSON,
) -> None:
    """Compare two checkpoints, however each of them is cut."""
    from paceline.checkpoint import open_checkpoint
    from paceline.checkpoint.tools.listing import compare

    with _reading():
        ours, theirs = open_checkpoint(find_any(left)), open_checkpoint(find_any(right))
        with progress_bar("comparing", ours.manifest.num_bytes, as_json) as tell:
            found = compare(ours, theirs, tell)
    text.show_difference(found, str(ours.path), str(theirs.path), as_json=as_json)
    if not found.is_same_state:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """The ranks that would have saved the checkpoint."""

    ranks: int = typer.Option(..., min=1, help="For so many ranks.")
    strategy: str = typer.Option("fsdp", help="As which strategy cuts: ddp, zero1, zero2, fsdp, hybrid.")
    pipeline: int = typer.Option(1, min=1, help="Stages among the ranks.")
    tensor: int = typer.Option(1, min=1, help="Ranks that share a matrix, among the ranks.")


@app.command()
@grouped
def reshard(
    source: str = _SOURCE,
    target: str = typer.Argument(metavar="DST", help="The folder or URL where step-<number> is written."),
    *,
    asked: ReshardOptions,
    fast: bool = _FAST,
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Rewrite a checkpoint as other ranks would have saved it."""
    from paceline.checkpoint import open_checkpoint
    from paceline.checkpoint.tools.stream import reshard as write
    from paceline.config.load import config_from_dict
    from paceline.plan.layout import STRATEGIES, Layout
    from paceline.plan.rules import check_layout
    from paceline.rehearse.dryrun.parts import cut_of_run

    _check_word("--strategy", asked.strategy, STRATEGIES)
    strategy = cast("Strategy", asked.strategy)
    layout = check_layout(Layout(strategy=strategy, pipeline=asked.pipeline, tensor=asked.tensor), asked.ranks)
    checkpoint = open_checkpoint(_find_whole(source, fast))
    values = checkpoint.manifest.about.get("config")
    cut = None
    if isinstance(values, dict) and layout.is_split:
        cut = cut_of_run(config_from_dict(values), layout)
    with progress_bar("writing", checkpoint.manifest.num_bytes, as_json) as tell:
        path = write(checkpoint, Path(target), layout, cut, progress=tell, may_replace=force)
    text.show_written("resharded", path, as_json=as_json)


@app.command()
def export(
    source: str = _SOURCE,
    target: Path = typer.Argument(metavar="OUT", help="The file, or with --hf or dcp the folder, to write."),
    kind: str = typer.Option(
        None, "--format", help="safetensors, torch or dcp.  [default: torch for .pt, .pth, .bin; else safetensors]"
    ),
    hf: bool = typer.Option(False, "--hf", help="A GPT as Hugging Face has it, with config.json."),
    optimizer: bool = typer.Option(False, "--optimizer", help="The optimizer's state, too."),
    fast: bool = _FAST,
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Write the model of a checkpoint in a format that others read."""
    from paceline.checkpoint import open_checkpoint
    from paceline.checkpoint.tools.outgoing import ExportOptions, exported_bytes, format_by_name
    from paceline.checkpoint.tools.outgoing import export as write

    if kind is not None:
        _check_word("--format", kind, ("safetensors", "torch", "dcp", "hf"))
    hf, kind = hf or kind == "hf", "safetensors" if kind == "hf" else kind
    chosen = format_by_name(target) if kind is None else cast("Format", kind)
    options = ExportOptions(format=chosen, is_hugging_face=hf, with_optimizer=optimizer, may_replace=force)
    checkpoint = open_checkpoint(_find_whole(source, fast))
    with progress_bar("writing", exported_bytes(checkpoint.manifest, options), as_json) as tell:
        path = write(checkpoint, target, options, tell)
    text.show_written("exported", path, as_json=as_json)


@app.command("import")
def take(
    source: Path = typer.Argument(
        metavar="SRC", readable=False, help="A safetensors or torch file, a Hugging Face or DCP folder."
    ),
    target: str = typer.Argument(metavar="DST", help="The folder or URL where step-00000000 is written."),
    kind: str = typer.Option(None, "--format", help="safetensors, torch or dcp.  [default: by what is there]"),
    prefix: str = typer.Option("", help="Take this off the names, such as 'module.'."),
    allow_pickle: bool = typer.Option(
        False, "--allow-pickle", help="Open torch files and DCP folders, which are pickles: trust who wrote them."
    ),
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Make a checkpoint of somebody's weights, to start a run from."""
    from paceline.checkpoint.tools.incoming import format_of, open_incoming, save_incoming

    if kind is not None:
        _check_word("--format", kind, ("safetensors", "torch", "dcp"))
    with _reading():
        chosen = cast("Format", kind) if kind is not None else format_of(source)
        found = open_incoming(source, chosen, prefix, allows_pickle=allow_pickle)
    with progress_bar("writing", found.num_bytes, as_json) as tell:
        path = save_incoming(found, Path(target), str(source), progress=tell, may_replace=force)
    text.show_written("imported", path, as_json=as_json)


def find_any(where: str) -> Path:
    """Returns the checkpoint that is named, as it is; of a run or folder, the newest whole one."""
    from paceline.checkpoint import find_checkpoint
    from paceline.checkpoint.manifest import MANIFEST
    from paceline.checkpoint.storage import storage_of

    path = Path(where)
    if storage_of(path).size(path / MANIFEST) is not None:
        return path  # damaged or not: what is wrong with it is for the command to say
    fix = "name a checkpoint, a run's folder, or one with checkpoints"
    return find_checkpoint(where, path, "fast", lambda passed: echo(f"paceline: {passed}", err=True), fix=fix)


def _find_whole(where: str, fast: bool) -> Path:
    """Returns the checkpoint that is named, after its files were compared: what is made of it has hashes of its own."""
    from paceline.checkpoint.find import verify_checkpoint

    with _reading():
        path = find_any(where)
        verify_checkpoint(path, "fast" if fast else "full")
        return path


def _check_word(option: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        fix = did_you_mean(word.lower(), known, "choose one of them", cutoff=0.5)
        raise UsageError(f"{option} {word}: there is none of that name\n  there are {', '.join(known)}\n  {fix}")


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Tells what the system lets nobody read in words, and not as a traceback."""
    from paceline.checkpoint.storage import cannot_read

    try:
        yield
    except OSError as error:
        raise cannot_read(Path(error.filename or "."), error) from error
