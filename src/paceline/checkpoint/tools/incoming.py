"""Imports: the weights of others, and the optimizer where the format has it, as a checkpoint to start from.

It is one of step 0, cut for one rank; ranks of any number and strategy load it. What a run has besides (random states,
position in the data) begins anew. Files are mapped or read in windows; a DCP folder, tensor by tensor.

The format is the one that is named, or what the first bytes and the names of files say. torch files and DCP folders
are pickles: they are opened only where the user allows it, and then as tensors and plain values, never as code.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from paceline.checkpoint.formats import check_found, read_header
from paceline.checkpoint.manifest import MALFORMED, MANIFEST, MODEL, OPTIMIZER, Manifest, SavedPiece, SavedTensor, State
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.storage import LocalFiles, cannot_read
from paceline.checkpoint.tensors import Progress, Stream, decode, encode, ignore_progress
from paceline.checkpoint.tools.hugging_face import from_hugging_face
from paceline.checkpoint.tools.outgoing import METADATA, Format
from paceline.checkpoint.tools.stream import stream_saved, write_checkpoint
from paceline.errors import CheckpointError, UsageError
from paceline.shards import whole_region
from paceline.untrusted import file_inside, open_regular, parse_json_object, read_regular

_STATE_DICT = "a state dict maps names to tensors\n  save it with torch.save(model.state_dict(), path)"
_MODELS = ("model", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optim", "optimizer", "optimizer_state_dict")
_DISTRIBUTED, _SAFETENSORS, _INDEX = ".metadata", "model.safetensors", "model.safetensors.index.json"
_ZIP = b"PK\x03\x04"
_MOST_COPIES = 16  # how often tensors of a torch file may show the same bytes: tied weights, views


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What was found in somebody's file: tensors of a model, and of an optimizer by ``parameter/key``.

    ``keys`` are those of ``model`` in a config for it, where the file tells.
    """

    model: dict[str, Stream]
    optimizer: dict[str, Stream] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(stream.num_bytes for stream in (*self.model.values(), *self.optimizer.values()))


def format_of(path: Path) -> Format:
    """Returns the format of what is at a path; loads nothing. Raises CheckpointError where nothing known is."""
    _check_there(path)
    if path.is_dir():
        if (path / _DISTRIBUTED).is_file() and not any((path / name).is_file() for name in (_SAFETENSORS, _INDEX)):
            return "dcp"
        _check_folder(path)
        return "safetensors"
    return "safetensors" if path.suffix == ".safetensors" or _head(path)[8:] == b"{" else "torch"


def open_incoming(path: Path, kind: Format, prefix: str = "", *, allows_pickle: bool = False) -> Incoming:
    """Reads what a file or folder has, but no tensor; takes ``prefix`` off names. Raises CheckpointError for others."""
    _check_there(path)
    if kind != "safetensors" and path.is_dir() != (kind == "dcp"):
        there, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise CheckpointError(f"{path} is a {there}\n  --format {kind} reads a {wanted}\n  leave --format out")
    if kind != "safetensors" and not allows_pickle:
        what = "torch's distributed checkpoint" if kind == "dcp" else "a torch file"
        text = f"{path} is {what}, a pickle: it was not opened"
        fix = "add --allow-pickle if you trust who wrote it (values alone are read), or convert it to safetensors"
        raise CheckpointError(f"{text}\n  a pickle can hold code; safetensors cannot\n  {fix}")
    if kind == "dcp":
        from paceline.checkpoint.tools.distributed import read_distributed

        found = _split_content(read_distributed(path))
    else:
        found = _open_torch(path) if kind == "torch" else _open_safetensors(path)
    if not found.model:
        raise CheckpointError(f"{path} has no tensors of a model\n  {_STATE_DICT}, or as safetensors")
    if not prefix:
        return found
    if lacking := [name for name in found.model if not name.startswith(prefix)]:
        what = f"--prefix {prefix}: {lacking[0]} does not begin so"
        raise UsageError(f"{what}\n  it is taken off every name\n  name what all of them begin with")
    both = (found.model, found.optimizer)
    model, optimizer = ({name.removeprefix(prefix): each for name, each in streams.items()} for streams in both)
    return replace(found, model=model, optimizer=optimizer)


def _check_there(path: Path) -> None:
    if not path.exists():
        rule = "weights are a safetensors or torch file, or a folder of Hugging Face or DCP"
        raise CheckpointError(f"{path} is not there\n  {rule}\n  check the path")


def _head(path: Path) -> bytes:
    """Returns the first bytes of a file: of safetensors the size of a header in eight bytes, and its first one."""
    try:
        with open_regular(path) as file:
            return file.read(9) or b""
    except OSError as error:
        raise cannot_read(path, error) from error


def _check_folder(path: Path) -> None:
    if any((path / name).is_file() for name in (_SAFETENSORS, _INDEX)):
        return
    is_ours = (path / MANIFEST).is_file() or (path / "checkpoints").is_dir()
    fix = "it is a checkpoint already: start from it with --resume" if is_ours else "name such a folder, or a file"
    rule = f"torch's distributed checkpoints have {_DISTRIBUTED}, folders of Hugging Face {_SAFETENSORS} or {_INDEX}"
    raise CheckpointError(f"{path} is no folder with weights\n  {rule}\n  {fix}")


def save_incoming(
    incoming: Incoming, folder: Path, source: str, *, progress: Progress = ignore_progress, may_replace: bool = False
) -> Path:
    """Writes what was found as ``folder/step-00000000``; returns its path."""
    streams = [replace(stream, name=MODEL + name) for name, stream in incoming.model.items()]
    streams += [replace(stream, name=OPTIMIZER + name) for name, stream in incoming.optimizer.items()]
    about = {"imported_from": source, "weights_only": not incoming.found, "reason": "import", "strategy": "ddp"}
    about |= {"config": {"model": dict(incoming.keys)}} if incoming.keys else {}
    plain = State(step=0, position=0, found=dict(incoming.found), about=about)
    return write_checkpoint(folder, [streams], plain, progress=progress, may_replace=may_replace)


def _open_safetensors(path: Path) -> Incoming:
    files, config = safetensors_files(path)
    folder = open_files(path if path.is_dir() else path.parent, files)
    if config is not None and config.get("model_type"):
        made, keys = from_hugging_face(config, folder)
        return Incoming(model=made, keys=keys)
    streams = {name: stream_saved(folder, name) for name in folder.shapes()}
    extra: dict[str, Any] = {}
    for file in files:
        extra |= _ours(file, read_header(LocalFiles(), file).metadata.get(METADATA, "{}"))
    return Incoming(
        model={name: each for name, each in streams.items() if not name.startswith(OPTIMIZER)},
        optimizer={name.removeprefix(OPTIMIZER): e for name, e in streams.items() if name.startswith(OPTIMIZER)},
        found=extra,
    )


def open_files(folder: Path, files: Iterable[Path]) -> Checkpoint:
    """Returns safetensors files of a folder as a checkpoint in which each tensor is one piece."""
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        header = read_header(LocalFiles(), file)
        if twice := tensors.keys() & header.tensors.keys():
            what = f"{file} has {min(twice)}, and another file too"
            raise CheckpointError(f"{what}\n  each tensor is in one file\n  copy the folder again")
        for name, place in header.tensors.items():
            pieces = (SavedPiece(file=file.name, region=whole_region(place.shape)),)
            tensors[name] = SavedTensor(shape=place.shape, dtype=place.dtype, pieces=pieces)
    return Checkpoint(folder, Manifest(step=0, position=0, world=1, tensors=tensors, files={}), LocalFiles())


def _ours(file: Path, text: str) -> dict[str, Any]:
    """Returns what an export of ours says of the optimizer. Raises CheckpointError for anything else."""
    try:
        found = parse_json_object(text).get("found", {})
        check_found({name: decode(value) for name, value in dict(found).items()})
        return dict(found)
    except (ValueError, TypeError) as error:
        what = f"{file} says under {METADATA!r} what no export has: {error}"
        raise CheckpointError(f"{what}\n  it is the state of an optimizer\n  export it again") from error


def safetensors_files(path: Path) -> tuple[list[Path], dict[str, Any] | None]:
    if not path.is_dir():
        return [path], None
    _check_folder(path)
    index, config = path / _INDEX, path / "config.json"
    names = {_SAFETENSORS} if not index.is_file() else _parse(index, lambda found: set(found["weight_map"].values()))
    found: dict[str, Any] | None = _parse(config, dict) if config.is_file() else None
    try:
        files = [file_inside(path, name) for name in sorted(names, key=str)]
    except ValueError as error:
        rule = f"{index.name} names files of its own folder"
        what = f"{path} is refused: {error}"
        raise CheckpointError(f"{what}\n  {rule}\n  copy it again, from somebody you trust") from error
    if lacking := [file for file in files if not file.exists()]:
        raise CheckpointError(f"{lacking[0]} is missing\n  {index.name} names {len(files)} files\n  copy all again")
    return files, found


def _parse(path: Path, take: Callable[[Any], Any]) -> Any:
    """Returns what is taken from a JSON file. Raises CheckpointError for one that is something else."""
    try:
        return take(parse_json_object(read_regular(file_inside(path.parent, path.name))))
    except OSError as error:
        raise cannot_read(path, error) from error
    except MALFORMED as error:
        what = f"{path} is damaged: {error}"
        raise CheckpointError(f"{what}\n  folders of Hugging Face have JSON there\n  copy it again") from error


def _reason(path: Path, error: Exception) -> str:
    """Returns why torch cannot read a file: its own words speak of memory maps for anything that is no zip file."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                is_begun = file.read(4) == _ZIP
            return "it is cut short" if is_begun else "it is no zip archive, as torch has written since version 1.6"
    except zipfile.BadZipFile as damage:  # before Python 3.13 it raises where it should say no
        return f"its zip archive is damaged: {damage}"
    return str(error).partition("\n")[0] or type(error).__name__


def _open_torch(path: Path) -> Incoming:
    if _head(path)[8:] == b"{":  # torch.load would go by the name, and read it as what it is
        what = f"{path} is a safetensors file"
        raise CheckpointError(f"{what}\n  --format torch reads what torch.save wrote\n  leave --format out")
    try:
        with open_regular(path) as file:
            by_name = path.suffix != ".safetensors"
            content = torch.load(path if by_name else file, map_location="cpu", weights_only=True, mmap=by_name)
    except (OSError, RuntimeError, EOFError, UnpicklingError, MemoryError, *MALFORMED) as error:
        what = f"{path} cannot be read as a torch file: {_reason(path, error)}"
        rule = "tensors and plain values are read, never code"
        raise CheckpointError(f"{what}\n  {rule}\n  save it with torch.save(model.state_dict(), path)") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}\n  {_STATE_DICT}")
    found = _split_content({str(name): value for name, value in content.items()})
    if found.num_bytes > _MOST_COPIES * path.stat().st_size:
        what = f"{path} has tensors of {found.num_bytes:,} bytes in a file of {path.stat().st_size:,}"
        raise CheckpointError(f"{what}\n  some show the same bytes again and again\n  save them with .clone()")
    return found


def _split_content(nested: Mapping[Any, Any]) -> Incoming:
    model = next((nested[name] for name in _MODELS if isinstance(nested.get(name), dict)), None)
    optimizer = next((nested[name] for name in _OPTIMIZERS if isinstance(nested.get(name), dict)), None)
    streams = {name: _stream(name, value) for name, value in (nested if model is None else model).items()}
    kept = {name: stream for name, stream in streams.items() if stream is not None}
    state = None if optimizer is None else optimizer.get("state")
    is_named = isinstance(state, Mapping) and bool(state) and all(isinstance(name, str) for name in state)
    if optimizer is None or not is_named:  # under numbers nobody knows whose it is
        return Incoming(model=kept)
    tensors, found = _optimizer_state(optimizer)
    return Incoming(model=kept, optimizer=tensors, found=found)


def _optimizer_state(optimizer: Mapping[str, Any]) -> tuple[dict[str, Stream], dict[str, Any]]:
    tensors: dict[str, Stream] = {}
    found: dict[str, Any] = {}
    label_of: dict[str, str] = {}
    groups = optimizer.get("param_groups", [])  # nested dicts may have them by number
    rows = [groups[key] for key in sorted(groups)] if isinstance(groups, Mapping) else groups
    for number, row in enumerate(rows):
        label = f"group/{number:08d}"
        found[label] = {key: value for key, value in row.items() if key not in ("params", "param_names")}
        label_of |= dict.fromkeys(row["params"], label)
    for name, label in label_of.items():
        values = {}
        for key, value in optimizer["state"].get(name, {}).items():
            stream = _stream(f"{name}/{key}", value)
            if stream is not None and key != "step" and stream.shape:
                tensors[f"{name}/{key}"] = stream
            else:
                values[key] = value if stream is None else stream.whole()
        found[OPTIMIZER + name] = {"group": label, "values": values}
    return tensors, {name: encode(value, name) for name, value in found.items()}


def _stream(name: str, value: Any) -> Stream | None:
    if isinstance(value, Stream):
        return value
    if isinstance(value, torch.Tensor):
        return Stream.made(name, value.shape, value.dtype, lambda: value)
    return None
