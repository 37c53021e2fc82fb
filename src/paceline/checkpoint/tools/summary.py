"""A checkpoint in words: what the manifest says of the run, its values, and its tensors one by one. Reads no tensor."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.find import read_manifest
from paceline.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, SavedTensor
from paceline.checkpoint.tensors import decode, dtype_of
from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLine:
    """One tensor: its shape and size, and who has a piece of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    files: tuple[str, ...]
    cut: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is known of a checkpoint without reading a tensor."""

    path: Path
    manifest: Manifest
    num_parameters: int
    bytes_by_kind: Mapping[str, int]
    bytes_by_dtype: Mapping[str, int]
    optimizer: Mapping[str, Any]
    tensors: tuple[TensorLine, ...]


def summarize(path: Path, pattern: str | None = None) -> Summary:
    """Reads a manifest; ``pattern`` (with ``*`` and ``?``) picks tensors by name.

    Raises UsageError for a pattern that fits none.
    """
    manifest = read_manifest(path)
    kinds: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for name, tensor in manifest.tensors.items():
        size = tensor_bytes(tensor)
        kind = name.partition("/")[0]
        kinds[kind] = kinds.get(kind, 0) + size
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + size
    chosen = [name for name in manifest.tensors if pattern is None or _fits(name, pattern)]
    if pattern is not None and not chosen:
        some = ", ".join(list(manifest.tensors)[:3])
        raise UsageError(f"no tensor fits {pattern!r}\n  names are such as {some}\n  * stands for any text")
    return Summary(
        path=path,
        manifest=manifest,
        num_parameters=sum(
            math.prod(tensor.shape) for name, tensor in manifest.tensors.items() if name.startswith(MODEL)
        ),
        bytes_by_kind=kinds,
        bytes_by_dtype=dtypes,
        optimizer=optimizer_settings(manifest),
        tensors=tuple(_line(name, manifest.tensors[name]) for name in chosen),
    )


def optimizer_settings(manifest: Manifest) -> dict[str, Any]:
    """Returns the settings of each of the optimizer's groups, by the number of parameters that it has."""
    groups = {name: decode(value) for name, value in manifest.found.items() if name.startswith("group/")}
    members: dict[str, int] = dict.fromkeys(groups, 0)
    for name, value in manifest.found.items():
        if name.startswith(OPTIMIZER):
            label = decode(value)["group"]
            members[label] = members.get(label, 0) + 1
    return {label: {"parameters": members[label], **settings} for label, settings in groups.items()}


def tensor_bytes(tensor: SavedTensor) -> int:
    """Returns the size of a whole tensor."""
    return math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.partition("/")[2], pattern)


def _line(name: str, tensor: SavedTensor) -> TensorLine:
    dims = {piece.region.dim for piece in tensor.pieces if piece.region.dim is not None}
    cut = f"dim {min(dims)}" if dims else "flat" if len(tensor.pieces) > 1 else "whole"
    return TensorLine(
        name=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        num_bytes=tensor_bytes(tensor),
        files=tuple(piece.file for piece in tensor.pieces),
        cut=cut,
    )
