"""Exports: a checkpoint in a format that others read. Written under a temporary name, and there when it is whole.

    safetensors   one file; with --hf a folder with config.json, for ``AutoModelForCausalLM.from_pretrained``
    torch         one file, for ``torch.load(path, weights_only=True)`` and ``model.load_state_dict``
    dcp           a folder, for ``torch.distributed.checkpoint.load``

With the optimizer, its state is under the parameters' names, as ``torch.distributed.checkpoint.state_dict`` has it.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import secrets
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.checkpoint.files import HUGGING_FACE, TOKENIZER, read_files, write_files
from paceline.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, damaged
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.storage import LocalFiles, cannot_write, put_in_place
from paceline.checkpoint.tensors import Progress, Stream, ignore_progress
from paceline.checkpoint.tools.adapters import merged_streams
from paceline.checkpoint.tools.hugging_face import shape_of, to_hugging_face
from paceline.checkpoint.tools.stream import check_parent, stream_made, stream_saved, write_safetensors
from paceline.checkpoint.tools.vocabulary import VOCABULARY, as_tokenizer_json
from paceline.errors import CheckpointError, UsageError
from paceline.shards import row_major

# A torch state dict in one file, written as a stream: what ``torch.load(path, weights_only=True)`` reads.
#
# The file is a zip archive without compression. ``data.pkl`` has the structure, in which every tensor is a reference to
# the bytes that follow under ``data/<n>``. torch itself needs all tensors in memory to write it; here it is one window.


_ALIGN_BYTES = 64  # as torch does: a file that is mapped has its tensors where processors want them
_HEADER_BYTES = 30  # of an entry, before its name and what is added to fill up
_NAME = "archive"
_STORAGES: Mapping[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()  # such as "FloatStorage"


def write_torch_file(path: Path, content: Mapping[str, Any], progress: Progress = ignore_progress) -> None:
    """Writes nested dicts and lists of plain values, tensors and streams. Raises UsageError for a dtype it has not."""
    structure = io.BytesIO()
    pickler = _Pickler(structure, protocol=2)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", [structure.getvalue()])
        _add(archive, "byteorder", [b"little"])
        for number, stream in enumerate(pickler.streams):
            _add(archive, f"data/{number}", stream.read(), progress, num_bytes=stream.num_bytes)
        _add(archive, "version", [b"3\n"])


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of a tensor: pickled as a reference to a file of the archive."""

    stream: Stream


class _Pickler(pickle.Pickler):
    """Pickles streams as tensors, and numbers them in their order."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.streams: list[Stream] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = stream_made("a value", value.shape, value.dtype, partial(torch.Tensor.clone, value))
        if not isinstance(value, Stream):
            return NotImplemented
        if value.dtype not in _STORAGES:
            raise UsageError(
                f"{value.name} is of {value.dtype}, which a torch file of this kind has not\n  export it as safetensors"
            )
        shape = value.shape
        arguments: tuple[Any, ...] = (_Storage(value), 0, shape, row_major(shape), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, _Storage):
            return None
        self.streams.append(value.stream)
        kind, elements = getattr(torch, _STORAGES[value.stream.dtype]), math.prod(value.stream.shape)
        return "storage", kind, str(len(self.streams) - 1), "cpu", elements


def _add(
    archive: zipfile.ZipFile,
    name: str,
    parts: Iterable[bytes | memoryview],
    progress: Progress = ignore_progress,
    *,
    num_bytes: int | None = None,
) -> None:
    """Adds a file to the archive, whose bytes begin at a multiple of 64."""
    info = zipfile.ZipInfo(f"{_NAME}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    is_large = num_bytes is not None and num_bytes >= zipfile.ZIP64_LIMIT
    start = archive.fp.tell() + _HEADER_BYTES + len(info.filename.encode()) + (20 if is_large else 0)  # type: ignore[union-attr]
    fill = -(start + 4) % _ALIGN_BYTES
    info.extra = b"FB" + fill.to_bytes(2, "little") + b"Z" * fill
    with archive.open(info, "w", force_zip64=is_large) as file:
        for part in parts:
            file.write(part)
            progress(len(part))


Format = Literal["safetensors", "torch", "dcp"]
METADATA = "paceline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What is exported, and how."""

    format: Format = "safetensors"
    is_hugging_face: bool = False
    with_optimizer: bool = False
    may_replace: bool = False

    def __post_init__(self) -> None:
        if self.is_hugging_face and (self.format != "safetensors" or self.with_optimizer):
            raise UsageError(
                "--hf is for --format safetensors, without --optimizer\n"
                "  Hugging Face's layout has the weights and a config.json\n  leave one of them out"
            )


def format_by_name(out: Path) -> Format:
    """Returns the format that a file's name asks for: .pt, .pth and .bin are torch's."""
    return "torch" if out.suffix in (".pt", ".pth", ".bin") else "safetensors"


def export(checkpoint: Checkpoint, out: Path, options: ExportOptions, progress: Progress = ignore_progress) -> Path:
    """Writes a checkpoint in another format; returns where. Raises CheckpointError if it cannot be written."""
    if out.exists() and not options.may_replace:
        raise CheckpointError(f"{out} is there already\n  it would be replaced\n  name another, or add --force")
    check_parent(out)
    names = [name for name in checkpoint.manifest.tensors if name.startswith(MODEL)]
    streams = {name.removeprefix(MODEL): stream_saved(checkpoint, name, name.removeprefix(MODEL)) for name in names}
    if not options.with_optimizer:
        streams = merged_streams(checkpoint, streams)
    if not streams:
        raise CheckpointError(
            f"{checkpoint.path} has no tensors of a model\n  their names begin with {MODEL}\n"
            "  look at it with paceline checkpoint inspect"
        )
    if options.is_hugging_face:
        write = _hugging_face_writer(checkpoint, streams, progress)
    else:
        write = _plain_writer(checkpoint, streams, options, progress)
    _write_atomically(out, write)
    return out


def optimizer_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the optimizer's state by parameters' names, with streams for tensors. Raises CheckpointError for none."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[str]] = {}
    for name, entry in checkpoint.found.items():
        if name.startswith(OPTIMIZER):
            parameter = name.removeprefix(OPTIMIZER)
            groups.setdefault(entry["group"], []).append(parameter)
            state[parameter] = dict(entry["values"])
    if not groups:
        raise CheckpointError(f"{checkpoint.path} has no optimizer\n  leave --optimizer out")
    for name in checkpoint.manifest.tensors:
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            if parameter not in state:
                raise damaged(f"{checkpoint.path} is damaged: it has {name}, and no group of {parameter}")
            state[parameter][key] = stream_saved(checkpoint, name)
    rows = [{**checkpoint.found[label], "params": members} for label, members in groups.items()]
    return {"state": {name: values for name, values in state.items() if values}, "param_groups": rows}


def exported_bytes(manifest: Manifest, options: ExportOptions) -> int:
    """Returns how much will be read."""
    wanted = (MODEL, OPTIMIZER) if options.with_optimizer else (MODEL,)
    return sum(tensor.num_bytes for name, tensor in manifest.tensors.items() if name.startswith(wanted))


def _hugging_face_writer(
    checkpoint: Checkpoint, streams: dict[str, Stream], progress: Progress
) -> Callable[[Path], object]:
    kept = read_files(checkpoint, HUGGING_FACE)
    if "config.json" in kept:
        made = list(streams.values())
    else:
        config, made = to_hugging_face(shape_of(checkpoint.manifest), streams)
        kept["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    kept |= read_files(checkpoint, TOKENIZER)
    if VOCABULARY in kept and "tokenizer.json" not in kept:
        kept |= as_tokenizer_json(kept[VOCABULARY])

    def write(path: Path) -> None:
        path.mkdir()
        write_files(kept, path)
        write_safetensors(path / "model.safetensors", made, {"format": "pt"}, progress)

    return write


def _plain_writer(
    checkpoint: Checkpoint, streams: dict[str, Stream], options: ExportOptions, progress: Progress
) -> Callable[[Path], object]:
    manifest, metadata, wanted = checkpoint.manifest, {"format": "pt"}, list(streams.values())
    content: dict[str, Any] = {"model": streams}
    if options.with_optimizer:
        content["optim"] = optimizer_content(checkpoint)
        wanted += [stream_saved(checkpoint, name) for name in manifest.tensors if name.startswith(OPTIMIZER)]
        metadata[METADATA] = json.dumps({"found": manifest.found})
    if options.format == "safetensors":
        return lambda path: write_safetensors(path, wanted, metadata, progress)
    if options.format == "torch":
        return lambda path: write_torch_file(path, content if options.with_optimizer else streams, progress)
    from paceline.checkpoint.tools.distributed import write_distributed

    return lambda path: write_distributed(path, content, progress)


def _write_atomically(out: Path, write: Callable[[Path], object]) -> None:
    """Writes under a temporary name and renames; what was there before is kept until then."""
    partial, files = out.with_name(f".{out.name}.{secrets.token_hex(4)}.new"), LocalFiles()
    try:
        write(partial)
        put_in_place(files, partial, out)
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        files.remove(partial)
