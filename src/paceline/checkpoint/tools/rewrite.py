"""A checkpoint written anew, as if other ranks had saved it: what ``reshard`` and ``import`` end in.

Each rank's files are streamed one after another, so that memory stays at one window; then they are committed as any
checkpoint is, and replace nothing that is there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import SavedPiece, SavedTensor, tensor_entry
from paceline.checkpoint.refusals import cannot_write
from paceline.checkpoint.remote import storage_of, url_of
from paceline.checkpoint.tensors import dtype_code, shown_shape
from paceline.checkpoint.tools.stream import Stream, Tell, be_silent, write_safetensors
from paceline.checkpoint.write import PlainState, Target, commit, discard
from paceline.errors import CheckpointError
from paceline.shards import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a rank is to have of a tensor, and how it is read: in the order of its region."""

    name: str
    region: Region
    dtype: torch.dtype
    read: Callable[[], Iterator[memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank is to have: pieces, and its own values as JSON values."""

    pieces: Sequence[Piece]
    own: Any = field(default_factory=lambda: {"dict": []})


def write_checkpoint(
    folder: Path, parts: Sequence[Part], plain: PlainState, *, tell: Tell = be_silent, may_replace: bool = False
) -> Path:
    """Writes ``folder/step-<n>`` with a part for each rank; returns its path.

    Raises CheckpointError if it is there already and may not be replaced, or cannot be written.
    """
    storage = storage_of(folder)
    token = secrets.token_hex(4)
    targets = [
        Target(folder=folder, step=plain.step, rank=rank, world=len(parts), token=token, storage=storage)
        for rank in range(len(parts))
    ]
    first = targets[0]
    if storage.names(first.final) and not may_replace:
        raise CheckpointError(
            f"{url_of(first.final)} is there already\n  it would be replaced\n  name another folder, or add --force"
        )
    try:
        for target, part in zip(targets, parts, strict=True):
            _write_part(target, part, plain.found if target.rank == 0 else {}, tell)
        commit(first, plain)
    except OSError as error:
        discard(first)
        raise cannot_write(first.final, error) from error
    except BaseException:
        discard(first)
        raise
    return first.final


def _write_part(target: Target, part: Part, found: Mapping[str, Any], tell: Tell) -> None:
    """Writes one rank's files, and last the one that says what is in them."""
    storage, stem = target.storage, f"rank-{target.rank:05d}"
    storage.make_folder(target.partial)
    groups: dict[str, list[Piece]] = {}
    for piece in part.pieces:
        groups.setdefault(dtype_code(piece.dtype), []).append(piece)
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for code, pieces in groups.items():
        name = f"{stem}.{code.lower()}.safetensors"
        streams = [Stream(name=p.name, shape=shown_shape(p.region), dtype=p.dtype, read=p.read) for p in pieces]
        written = write_safetensors(storage, target.partial / name, streams, tell=tell)
        files[name] = {"bytes": written.num_bytes, "sha256": written.sha256}
        tensors |= {piece.name: _entry(piece, code, name) for piece in pieces}
    text = {"rank": target.rank, "values": part.own, "found": dict(found), "files": files, "tensors": tensors}
    storage.write(target.partial / f"{stem}.json", [json.dumps(text, allow_nan=False).encode()])


def _entry(piece: Piece, code: str, file: str) -> dict[str, Any]:
    found = SavedTensor(shape=piece.region.shape, dtype=code, pieces=(SavedPiece(file=file, region=piece.region),))
    return tensor_entry(found)
