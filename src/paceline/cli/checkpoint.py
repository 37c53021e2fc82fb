"""``paceline checkpoint``: look at checkpoints, and carry them elsewhere, without the model's code or a GPU."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from paceline.cli.completion import complete_run
from paceline.cli.options import check_word, print_json, progress_bar
from paceline.errors import UsageError
from paceline.plan.layout import STRATEGIES, Layout, Strategy
from paceline.terminal import echo, excerpt, table_lines
from paceline.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paceline.checkpoint.read import Checkpoint
    from paceline.checkpoint.tools.listing import Difference, Listed, Summary
    from paceline.checkpoint.tools.outgoing import Format

app = typer.Typer(no_args_is_help=True, help="List, verify, compare, reshard and convert checkpoints.")

_JSON = typer.Option(False, "--json", help="Print it as JSON.")
_FAST = typer.Option(False, "--fast", help="Compare the sizes of the source's files, not their hashes, before.")
_SOURCE = typer.Argument(metavar="SRC", autocompletion=complete_run, help="A checkpoint, run, folder or URL.")
_FORCE = typer.Option(False, "--force", help="Replace what is there.")
_NEWEST = "A checkpoint; of a run or folder, the newest whole one. URLs work, too."
_PATH = typer.Argument(metavar="PATH", autocompletion=complete_run, help=_NEWEST)


@app.command("ls")
def list_all(
    where: str = typer.Argument(
        metavar="RUN|FOLDER", autocompletion=complete_run, help="A run's folder, one with checkpoints, or a URL."
    ),
    full: bool = typer.Option(False, "--full", help="Compare the hash of every file, too: reads everything."),
    as_json: bool = _JSON,
) -> None:
    """List the checkpoints of a run, and whether they are whole."""
    from paceline.checkpoint.tools.listing import list_folder

    with _reading(), progress_bar("reading", None, as_json) as tell:
        found = list_folder(Path(where), time.time(), "full" if full else "fast", tell)
    if as_json:
        print_json([{**asdict(each), "path": str(each.path), "is_whole": not each.problem} for each in found])
    else:
        titles = ("step", "age", "size", "written by", "whole", "metrics", "kept because")
        echo("\n".join(table_lines([titles, *map(_listed, found)])))
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
    show_summary(found, lists_tensors=tensors is not None, as_json=as_json)


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
    if as_json:
        checks = [{**asdict(check), "is_good": check.is_good} for check in found.checks]
        print_json({**asdict(found), "is_good": found.is_good, "checks": checks})
    else:
        echo(f"{found.path}: {'good' if found.is_good else 'DAMAGED'}")
        for check in found.checks:
            word = ("good" if check.is_good else "WRONG") if check.is_done else "-"
            echo(f"  {check.what:<9}{word:<7}{check.finding}")
            _echo_first([f"{'':18}{problem}" for problem in check.problems], f"{'':18}and {{}} more: --json lists them")
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
    show_difference(found, str(ours.path), str(theirs.path), as_json=as_json)
    if not found.is_same_state:
        raise typer.Exit(1)


@app.command()
def reshard(
    source: str = _SOURCE,
    target: str = typer.Argument(metavar="DST", help="The folder or URL where step-<number> is written."),
    *,
    ranks: int = typer.Option(..., min=1, help="For so many ranks."),
    strategy: str = typer.Option("fsdp", help="As which strategy cuts: ddp, zero1, zero2, fsdp, hybrid."),
    pipeline: int = typer.Option(1, min=1, help="Stages among the ranks."),
    tensor: int = typer.Option(1, min=1, help="Ranks that share a matrix, among the ranks."),
    fast: bool = _FAST,
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Rewrite a checkpoint as other ranks would have saved it."""
    from paceline.checkpoint.tools.stream import reshard as write
    from paceline.config.load import config_from_dict
    from paceline.plan.rules import check_layout
    from paceline.rehearse.dryrun.parts import cut_of_run

    check_word("--strategy", strategy, STRATEGIES)
    layout = check_layout(Layout(strategy=cast("Strategy", strategy), pipeline=pipeline, tensor=tensor), ranks)
    checkpoint = _open_whole(source, fast)
    values = checkpoint.manifest.about.get("config")
    cut = None
    if isinstance(values, dict) and "data" in values and layout.is_split:  # an import says of its model alone
        cut = cut_of_run(config_from_dict(values), layout)
    with progress_bar("writing", checkpoint.manifest.num_bytes, as_json) as tell:
        path = write(checkpoint, Path(target), layout, cut, progress=tell, may_replace=force)
    show_written("resharded", path, as_json=as_json)


@app.command()
def export(
    source: str = _SOURCE,
    target: Path = typer.Argument(metavar="OUT", help="The file, or with --hf, dcp or peft the folder, to write."),
    kind: str = typer.Option(
        None, "--format", help="safetensors, torch, dcp, hf, or peft: the adapters alone.  [default: by the ending]"
    ),
    hf: bool = typer.Option(False, "--hf", help="A GPT as Hugging Face has it, with config.json."),
    optimizer: bool = typer.Option(False, "--optimizer", help="The optimizer's state, too."),
    fast: bool = _FAST,
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Write the model of a checkpoint in a format that others read."""
    from paceline.checkpoint.tools.outgoing import ExportOptions, exported_bytes, format_by_name
    from paceline.checkpoint.tools.outgoing import export as write

    if kind is not None:
        check_word("--format", kind, ("safetensors", "torch", "dcp", "hf", "peft"))
    hf, peft, kind = hf or kind == "hf", kind == "peft", "safetensors" if kind in ("hf", "peft") else kind
    chosen = format_by_name(target) if kind is None else cast("Format", kind)
    given = {"is_hugging_face": hf, "is_peft": peft, "with_optimizer": optimizer, "may_replace": force}
    options = ExportOptions(format=chosen, **given)
    checkpoint = _open_whole(source, fast)
    with progress_bar("writing", exported_bytes(checkpoint.manifest, options), as_json) as tell:
        path = write(checkpoint, target, options, tell)
    show_written("exported", path, as_json=as_json)


@app.command()
def merge(
    source: str = _SOURCE,
    target: Path = typer.Argument(metavar="OUT", help="The folder to write, for from_pretrained."),
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Write the weights of a model with its adapters added."""
    from paceline.checkpoint.tools.outgoing import saved_adapters

    if not saved_adapters(_open_whole(source, fast=True)):
        rule = "merge adds low-rank adapters to the weights that they were trained on"
        raise UsageError(f"{source} has no adapters\n  {rule}\n  take paceline checkpoint export")
    export(source, target, kind="hf", hf=True, optimizer=False, fast=False, force=force, as_json=as_json)


@app.command("import")
def take(
    source: Path = typer.Argument(metavar="SRC", readable=False, help="Weights: safetensors, torch, Hugging Face, DCP"),
    target: str = typer.Argument(metavar="DST", help="The folder or URL where step-00000000 is written."),
    kind: str = typer.Option(None, "--format", help="safetensors, torch or dcp.  [default: by what is there]"),
    prefix: str = typer.Option("", help="Take this off the names, such as 'module.'."),
    allow_pickle: bool = typer.Option(False, "--allow-pickle", help="Open pickles (torch, DCP): trust who wrote them."),
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Make a checkpoint of somebody's weights, to start a run from."""
    from paceline.checkpoint.tools.incoming import format_of, open_incoming, save_incoming

    if kind is not None:
        check_word("--format", kind, ("safetensors", "torch", "dcp"))
    with _reading():
        chosen = cast("Format", kind) if kind is not None else format_of(source)
        found = open_incoming(source, chosen, prefix, allows_pickle=allow_pickle)
    with progress_bar("writing", found.num_bytes, as_json) as tell:
        path = save_incoming(found, Path(target), str(source), progress=tell, may_replace=force)
    show_written("imported", path, as_json=as_json, keys=found.keys)


@app.command()
def upcycle(
    source: str = typer.Argument(metavar="SRC", help="A dense GPT: a checkpoint, run or weights as import takes them."),
    target: str = typer.Argument(metavar="DST", help="The folder or URL where step-00000000 is written."),
    *,
    experts: int = typer.Option(..., min=2, help="Experts of a layer, each of which begins as its MLP."),
    active: int = typer.Option(2, min=2, help="Experts that take a token, for the model's config."),
    dense_layers: int = typer.Option(0, min=0, help="Layers at the beginning that stay dense."),
    seed: int = typer.Option(0, min=0, max=2**31, help="Draws the routers."),
    force: bool = _FORCE,
    as_json: bool = _JSON,
) -> None:
    """Make a mixture of experts of a dense GPT, to start a run from."""
    from paceline.checkpoint.manifest import MODEL
    from paceline.checkpoint.tools.experts import upcycled
    from paceline.checkpoint.tools.incoming import Incoming, format_of, open_incoming, save_incoming
    from paceline.checkpoint.tools.stream import stream_saved
    from paceline.config.sections import GPTModelConfig

    if active > experts:
        rule = "a token takes different experts"
        raise UsageError(f"--active {active} of --experts {experts}\n  {rule}\n  give at most as many")
    path = Path(source)
    if path.is_file() or (path / "config.json").is_file():
        with _reading():
            found = open_incoming(path, format_of(path))
    else:
        checkpoint = _open_whole(source, fast=False)
        streams = {name: stream_saved(checkpoint, MODEL + name) for name in checkpoint.shapes(MODEL)}
        found = Incoming(model=streams, keys=checkpoint.manifest.setting("model") or {})
    keys = {**found.keys, "experts": experts, "active": active, "dense_layers": dense_layers or None}
    found = Incoming(model=upcycled(found.model, experts, dense_layers, seed), keys=keys)
    with progress_bar("writing", found.num_bytes, as_json) as tell:
        written = save_incoming(found, Path(target), source, progress=tell, may_replace=force)
    needed = GPTModelConfig.model_validate(keys).model_dump(mode="json", exclude_defaults=True)
    show_written("upcycled", written, as_json=as_json, keys={"kind": "gpt", **needed})


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


def _open_whole(where: str, fast: bool) -> Checkpoint:
    """Opens the checkpoint that is named, after its files were compared: what is made of it has hashes of its own."""
    from paceline.checkpoint import open_checkpoint
    from paceline.checkpoint.find import verify_checkpoint

    with _reading():
        path = find_any(where)
        verify_checkpoint(path, "fast" if fast else "full")
    return open_checkpoint(path)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Tells what the system lets nobody read in words, and not as a traceback."""
    from paceline.checkpoint.storage import cannot_read

    try:
        yield
    except OSError as error:
        raise cannot_read(Path(error.filename or "."), error) from error


_FIRST = 20  # rows of a long table, of which JSON has all


def _listed(each: Listed) -> tuple[str, ...]:
    return (
        str(each.step),
        format_seconds(each.age_s) if each.age_s is not None else "-",
        format_bytes(each.num_bytes),
        _world(each.world, each.strategy, each.mesh or {}),
        f"NO: {each.problem}" if each.problem else "yes",
        ", ".join(f"{name} {value:.4g}" for name, value in (each.metrics or {}).items()) or "-",
        ", ".join(each.kept) or "-",
    )


def show_summary(found: Summary, *, lists_tensors: bool, as_json: bool) -> None:
    """Shows a manifest in words, and tensors if they were asked for."""
    manifest, about = found.manifest, found.manifest.about
    if as_json:
        shown: dict[str, Any] = {"path": str(found.path)}
        for name in ("step", "position", "world", "num_bytes", "metrics", "about"):
            shown[name] = getattr(manifest, name)
        for name in ("num_parameters", "bytes_by_kind", "bytes_by_dtype", "optimizer"):
            shown[name] = getattr(found, name)
        shown["files"] = {name: asdict(file) for name, file in manifest.files.items()}
        print_json(shown | ({"tensors": [asdict(each) for each in found.tensors]} if lists_tensors else {}))
        return
    echo(f"{found.path}")
    reason = about.get("reason", "a call")
    echo(f"  step {manifest.step}, {manifest.position:,} samples consumed, saved because of: {reason}")
    world = _world(manifest.world, str(about.get("strategy", "")), manifest.mesh)
    echo(f"  written by {world} into {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}")
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in found.bytes_by_kind.items())
    dtypes = ", ".join(f"{code} {format_bytes(size)}" for code, size in found.bytes_by_dtype.items())
    echo(f"  {len(manifest.tensors)} tensors, {format_count(found.num_parameters)} elements in the model")
    echo(f"    by kind   {kinds}")
    echo(f"    by dtype  {dtypes}")
    for settings in found.optimizer.values():
        given = {key: value for key, value in settings.items() if value is not None and value is not False}
        words = [f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in given.items()]
        echo(f"  optimizer group: {', '.join(words)}")
    if manifest.metrics:
        echo("  metrics: " + ", ".join(f"{name} {value:.6g}" for name, value in manifest.metrics.items()))
    echo(f"  values: {', '.join(manifest.values) or 'none'}")
    if not lists_tensors:
        echo("  list tensors with --tensors '*'")
        return
    rows = []
    for each in found.tensors:
        pieces = "whole" if (len(each.files), each.cut) == (1, "whole") else f"{len(each.files)} ({each.cut})"
        shape = "x".join(map(str, each.shape)) or "scalar"
        rows.append((each.name, each.dtype, shape, format_bytes(each.num_bytes), pieces))
    echo("\n".join(table_lines([("tensor", "dtype", "shape", "size", "pieces"), *rows])))


def show_difference(found: Difference, left: str, right: str, *, as_json: bool) -> None:
    """Shows what differs, the tensors that are furthest apart first."""
    if as_json:
        print_json({"left": left, "right": right, "is_same_state": found.is_same_state, **asdict(found)})
        return
    echo(f"A  {left}\nB  {right}")
    for title, names in (("only in A", found.only_left), ("only in B", found.only_right), ("other", found.other_shape)):
        _echo_first([f"  {title}: {name}" for name in names], f"  {title}: and {{}} more")
    if found.tensors:
        ordered = sorted(found.tensors, key=lambda each: (-each.max_absolute, each.name))
        rows = []
        for each in ordered[:_FIRST]:
            sizes = (each.max_absolute, each.max_relative)
            most = ("not a number" if math.isinf(size) else f"{size:.3g}" for size in sizes)
            rows.append((each.name, f"{each.num_different:,} of {each.num_elements:,}", *most))
        echo("\n".join(table_lines([("tensor", "elements that differ", "largest", "relative"), *rows])))
        if len(ordered) > _FIRST:
            echo(f"  and {len(ordered) - _FIRST} more tensors: --json lists them")
    for title, pairs in (("value", found.values), ("setting", found.settings)):
        shown = [(name, *map(excerpt, map(repr, both))) for name, both in pairs.items()]
        lines = [f"  {title} {name}: {ours} -> {theirs}" for name, ours, theirs in shown]
        _echo_first(lines, f"  and {{}} more {title}s: --json lists them")
    same = found.num_compared - len(found.tensors)
    word = "the same state, to the last bit" if found.is_same_state else "other states"
    echo(f"{same} of {found.num_compared} tensors are alike: {word}")


def show_written(what: str, path: Path, *, as_json: bool, keys: Mapping[str, Any] | None = None) -> None:
    """Says where something is, and which model its tensors are, by the ``keys`` of ``model`` in a config."""
    from paceline.checkpoint.storage import url_of

    if as_json:
        print_json({what: url_of(path), **({"model": dict(keys)} if keys else {})})
    else:
        echo(f"{what} to {url_of(path)}" + (f"\n  model: {json.dumps(keys)}" if keys else ""))


def _world(ranks: int, strategy: str, mesh: Any) -> str:
    if not ranks:
        return "-"
    axes = "".join(f", {name} {size}" for name, size in mesh.items() if isinstance(size, int) and size > 1)
    return f"{ranks} rank{'s' if ranks > 1 else ''}{f' {strategy}' if strategy else ''}{axes}"


def _echo_first(lines: Sequence[str], rest: str) -> None:
    for line in lines[:_FIRST]:
        echo(line)
    if len(lines) > _FIRST:
        echo(rest.format(len(lines) - _FIRST))
