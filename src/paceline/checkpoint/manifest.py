"""The manifest: what a checkpoint holds, in which files, and how to know that these are whole.

It is the last file of a checkpoint to be written, and plain JSON. For every tensor it has the shape, the dtype and the
pieces: the file that has a piece (under the tensor's name) and the region of the whole that it is. Size: about 100
bytes for each tensor and rank that wrote a piece of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint.line import Line, Spot, parse_line
from paceline.errors import CheckpointError
from paceline.shards import Region

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of a checkpoint, as it was when it was written."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> SavedFile:
        """Returns what is noted of a file with this content."""
        return cls(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPiece:
    """A part of a tensor, in a file under the tensor's name."""

    file: str
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A whole tensor, wherever its parts are. ``dtype`` is a safetensors code such as F32."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint before a tensor is read.

    ``values`` are plain values that are the same on every rank: scaler, schedule, counters, metrics. ``found`` are
    those that single ranks knew, such as an optimizer's of its parameters. ``about`` is what the run was: its config,
    strategy and mesh. ``line`` is how the run came to this step: see ``line.py``.
    """

    step: int
    position: int
    world: int
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]
    values: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    line: Line = field(default_factory=Line)

    @property
    def spot(self) -> Spot:
        """Where it lies among others."""
        return Spot(line=self.line, step=self.step)

    @property
    def num_bytes(self) -> int:
        """How large the files are together, this one left out."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured at this step, by name."""
        pairs = (self.values.get("metrics") or {"dict": []})["dict"]
        return {name: value for name, value in pairs if isinstance(value, int | float)}


def manifest_text(manifest: Manifest) -> str:
    """Writes a manifest as JSON: one line for each tensor and file, so that it can be read, and compared."""
    head = {
        "schema": SCHEMA_VERSION,
        "step": manifest.step,
        "position": manifest.position,
        "world": manifest.world,
        "line": manifest.line.to_json(),
        "about": manifest.about,
        "values": manifest.values,
    }
    lines = [f"  {_dump(name)}: {_dump(value)}" for name, value in head.items()]
    files = {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in manifest.files.items()}
    lines += [f'  "files": {_table(files)}']
    lines += [f'  "found": {_table(manifest.found)}']
    lines += [f'  "tensors": {_table({name: tensor_entry(tensor) for name, tensor in manifest.tensors.items()})}']
    body = "{\n" + ",\n".join(lines)
    return body + _tail(body)


def _tail(body: str) -> str:
    """Returns the manifest's own hash, which ends it: a change of any byte before it, or in it, is seen."""
    return f',\n  "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def parse_manifest(text: str, source: object) -> Manifest:
    """Reads a manifest. Raises CheckpointError for anything else."""
    try:
        found = json.loads(text)
        schema = found["schema"]
        if schema != SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema {schema}; this version reads {SCHEMA_VERSION}\n"
                "  read it with the version that wrote it"
            )
        body = text[: -len(_tail(""))]
        if text != body + _tail(body):
            raise CheckpointError(f"{source}'s manifest is damaged: its hash is not its own\n  use an older checkpoint")
        return Manifest(
            step=int(found["step"]),
            position=int(found["position"]),
            world=int(found["world"]),
            tensors={name: parse_tensor(entry) for name, entry in found["tensors"].items()},
            files={name: SavedFile(num_bytes=e["bytes"], sha256=e["sha256"]) for name, e in found["files"].items()},
            values=found["values"],
            found=found["found"],
            about=found["about"],
            line=parse_line(found.get("line", Line().to_json())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{source} is no manifest: {type(error).__name__}: {error}\n  use an older checkpoint"
        ) from error


def head_line(head: bytes) -> Line | None:
    """Returns the line that the first bytes of a manifest tell; None where they do not."""
    found = re.search(rb'^  "line": (\[\[[0-9, \[\]]*\]\]),$', head, re.MULTILINE)
    try:
        return None if found is None else parse_line(json.loads(found[1]))
    except (CheckpointError, ValueError):
        return None


def tensor_entry(tensor: SavedTensor) -> dict[str, Any]:
    """Returns a tensor as JSON values."""
    pieces = [{"file": piece.file, **_region_entry(piece.region)} for piece in tensor.pieces]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": pieces}


def parse_tensor(entry: Mapping[str, Any]) -> SavedTensor:
    """Reads what ``tensor_entry`` gave."""
    shape = tuple(entry["shape"])
    pieces = tuple(SavedPiece(file=each["file"], region=_parse_region(shape, each)) for each in entry["pieces"])
    return SavedTensor(shape=shape, dtype=entry["dtype"], pieces=pieces)


def _region_entry(region: Region) -> dict[str, Any]:
    entry: dict[str, Any] = {"begin": region.begin, "end": region.end}
    if region.dim is not None:
        entry |= {"dim": region.dim, "spans": [list(span) for span in region.spans]}
    if region.order is not None:
        entry["order"] = list(region.order)
    return entry


def _parse_region(shape: tuple[int, ...], entry: Mapping[str, Any]) -> Region:
    order = entry.get("order")
    return Region(
        shape=shape,
        begin=entry["begin"],
        end=entry["end"],
        dim=entry.get("dim"),
        spans=tuple((first, last) for first, last in entry.get("spans", ())),
        order=None if order is None else tuple(order),
    )


def _table(rows: Mapping[str, Any]) -> str:
    if not rows:
        return "{}"
    return "{\n" + ",\n".join(f"    {_dump(name)}: {_dump(rows[name])}" for name in rows) + "\n  }"


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
