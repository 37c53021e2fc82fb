"""The manifest: what a checkpoint holds, in which files, and how to know that these are whole.

It is the last file of a checkpoint to be written, and plain JSON. For every tensor it has the shape, the dtype and the
pieces, each with its file and its region of the whole. Size: about 100 bytes for each tensor and rank that wrote one.

Lines of descent say which checkpoints of a folder a run came along, and which it has gone back from:

    step     4 --- 8 --- 12 --- 16             line 0: ((0, 0),)
                    \\
                     12 --- 16 --- 20          line 1: ((0, 0), (1, 8)): line 0 up to step 8, and from there line 1

A run that goes back to an older checkpoint and saves again takes a new line, with a number above all others of the
folder. The line with the highest number is the current one; its checkpoints, and those that it came along, go before
all others, however high the steps of these are.

A manifest is input: whoever wrote it may have meant harm. ``parse_manifest`` refuses names that lead out of the folder,
and shapes, regions and sizes that cannot be or that the files have no room for. Pure values; no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import CheckpointError
from paceline.shards import Region, Shard, Spans
from paceline.untrusted import is_count, kind_of, parse_json, parse_json_object, plain_name

if TYPE_CHECKING:
    from paceline.comm.base import Communicator

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
HEAD, SEAL = "head.json", ".sha256"  # of snapshots (``storage.py``)
MODEL = "model/"
OPTIMIZER = "optimizer/"
COMPRESSION = "compression/"
AVERAGE = "average/"
# How many bytes an element of each dtype has, by safetensors' names.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEM_BYTES |= {"C64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
_CUT_KEYS = {"dim", "spans", "cuts", "order"}
_MOST_DIMS = 64
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)


def damaged(what: str) -> CheckpointError:
    return CheckpointError(f"{what}\n  use an older checkpoint")


@dataclass(frozen=True, slots=True)
class Line:
    """The turns of a line: the number of each part of it, and the step behind which that begins."""

    turns: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def number(self) -> int:
        """Which line it is; a higher one was begun later."""
        return self.turns[-1][0]

    def has(self, other: Line, step: int) -> bool:
        """Says whether a checkpoint of another line lies on this one, too."""
        length = len(other.turns)
        if self.turns[:length] != other.turns:
            return False
        return length == len(self.turns) or step <= self.turns[length][1]

    def to_json(self) -> list[list[int]]:
        return [list(turn) for turn in self.turns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a checkpoint lies: its line and its step."""

    line: Line
    step: int

    @property
    def age(self) -> tuple[int, int]:
        """Sorts checkpoints by when they were written, as far as lines and steps tell."""
        return self.line.number, self.step


def parse_line(value: Any) -> Line:
    """Reads what ``to_json`` gave. Raises CheckpointError for anything else."""
    try:
        turns = tuple((_count("a line", number), _count("a step", step)) for number, step in value)
        if not turns:
            raise ValueError("no turns")
        return Line(turns)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{kind_of(value)} is no line of descent: {error}") from error


def line_from(start: Spot | None, found: Sequence[Spot]) -> Line:
    """Returns the line of a run from ``start`` (None: none): its own, or a new one where ``found`` are later."""
    spot = start or Spot(line=Line(), step=0)
    latest = max((each.age for each in found), default=(0, 0))
    if latest <= spot.age:
        return spot.line
    turn = (latest[0] + 1, spot.step)
    return Line((turn,)) if start is None else Line((*spot.line.turns, turn))


def likely_line(step: int, found: Sequence[Spot]) -> Line:
    """Returns the line of a step of which no more is known: that of the last one before it on the newest line."""
    newest = newest_line(found)
    before = [each for each in found if each.step < step and newest.has(each.line, each.step)]
    return line_from(max(before, key=lambda each: each.age, default=None), found)


def newest_line(found: Iterable[Spot], own: Line | None = None) -> Line:
    """Returns the current line among those of some checkpoints, and the one that a run is on, if it is known."""
    lines = [*(each.line for each in found), *([] if own is None else [own])]
    return max(lines, key=lambda line: line.number, default=Line())


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of a checkpoint, as it was when it was written."""

    num_bytes: int
    sha256: str


def files_entry(files: Mapping[str, SavedFile]) -> dict[str, Any]:
    return {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in files.items()}


def parse_files(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, SavedFile]:
    """Reads what ``files_entry`` gave. Raises one of ``MALFORMED`` for anything else."""
    rows = [(plain_name(name), _count("a size", row["bytes"]), str(row["sha256"])) for name, row in entries.items()]
    return {name: SavedFile(num_bytes=num_bytes, sha256=sha256) for name, num_bytes, sha256 in rows}


def _count(what: str, value: Any, most: int = 2**60) -> int:
    if not is_count(value, most):
        raise ValueError(f"{what} is {value if type(value) is int else kind_of(value)}, and not from 0 to {most}")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPiece:
    """A part of a tensor, in a file under the tensor's name, or in files of others under ``name``."""

    file: str
    region: Region
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A whole tensor, wherever its parts are. ``dtype`` is a safetensors code such as F32."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SavedPiece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint before a tensor is read.

    ``values`` are plain values, the same on every rank. ``found`` are those that single ranks knew, such as an
    optimizer's. ``about`` is what the run was: its config, strategy and mesh. ``line`` is how it came to this step.
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
        return Spot(line=self.line, step=self.step)

    @property
    def num_bytes(self) -> int:
        """How large the files are together, this one left out."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured at this step, by name."""
        noted = self.values.get("metrics")
        pairs = noted.get("dict") if isinstance(noted, dict) else None
        rows = [each for each in pairs if isinstance(each, list)] if isinstance(pairs, list) else []
        return {row[0]: row[1] for row in rows if [type(each) for each in row] in ([str, float], [str, int])}

    @property
    def mesh(self) -> dict[str, int]:
        """How many stages and tensor ranks were among those that wrote it, as far as it says."""
        found = self.about.get("mesh")
        return {name: size for name, size in found.items() if is_count(size)} if isinstance(found, dict) else {}

    def setting(self, *names: str) -> Any:
        """Returns a value of the run's config, by the names of its sections and its own; None where there is none."""
        value: Any = self.about.get("config")
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value


def manifest_text(manifest: Manifest) -> str:
    """Writes a manifest as JSON: one line for each tensor and file, so that it can be read, and compared."""
    head: dict[str, Any] = {"schema": SCHEMA_VERSION, "step": manifest.step, "position": manifest.position}
    head |= {"world": manifest.world, "line": manifest.line.to_json(), "about": manifest.about}
    head["values"] = manifest.values
    tensors = {name: tensor_entry(tensor) for name, tensor in manifest.tensors.items()}
    tables = {"files": files_entry(manifest.files), "found": manifest.found, "tensors": tensors}
    lines = [f"  {_dump(name)}: {_dump(value)}" for name, value in head.items()]
    lines += [f'  "{name}": {_table(rows)}' for name, rows in tables.items()]
    body = "{\n" + ",\n".join(lines)
    return body + _tail(body)


def _tail(body: str) -> str:
    """Returns the manifest's own hash, which ends it: a change of any byte before it, or in it, is seen."""
    return f',\n  "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def parse_manifest(text: str, source: object) -> Manifest:
    """Reads a manifest. Raises CheckpointError for anything else."""
    try:
        found = parse_json_object(text)
        schema = found["schema"]
        if schema != SCHEMA_VERSION:
            shown = schema if is_count(schema, 10**6) else kind_of(schema)
            what = f"{source} has schema {shown}; this version reads {SCHEMA_VERSION}"
            raise CheckpointError(f"{what}\n  read it with the version that wrote it")
        body = text[: -len(_tail(""))]
        if text != body + _tail(body):
            raise damaged(f"{source}'s manifest is damaged: its hash is not its own")
        fields: dict[str, Any] = {what: found[what] for what in ("values", "found", "about")}
        for what, value in fields.items():
            if not isinstance(value, dict):
                raise ValueError(f"{what} is {kind_of(value)}, and not an object with names")
        fields |= {what: _count(what, found[what]) for what in ("step", "position", "world")}
        tensors = {name: parse_tensor(entry) for name, entry in found["tensors"].items()}
        line = parse_line(found.get("line", Line().to_json()))
        manifest = Manifest(**fields, tensors=tensors, files=parse_files(found["files"]), line=line)
        _check_room(manifest)
        return manifest
    except MALFORMED as error:
        raise damaged(f"{source} is no manifest: {reason_of(error)}") from error


def _check_room(manifest: Manifest) -> None:
    """Raises ValueError where tensors are larger than the files that are to have them."""
    if manifest.world > len(manifest.files):
        raise ValueError(f"{manifest.world} ranks wrote {len(manifest.files)} files, and each writes at least one")
    needed = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            if piece.file not in needed:
                raise ValueError(f"{name} is in {str(piece.file)[:80]}, which is none of its files")
            needed[piece.file] += piece.region.size * ITEM_BYTES[tensor.dtype]
        # A rank may have no residual of compression; there is at most one row for each rank.
        if name.startswith(COMPRESSION) and tensor.num_bytes > manifest.world * manifest.num_bytes:
            raise ValueError(f"{name} has {tensor.num_bytes:,} bytes, and all files {manifest.num_bytes:,}")
    for name, file in manifest.files.items():
        if needed[name] > file.num_bytes:
            raise ValueError(f"{name} has {file.num_bytes:,} bytes, and its tensors would have {needed[name]:,}")


def head_line(head: bytes) -> Line | None:
    """Returns the line that the first bytes of a manifest tell; None where they do not."""
    found = re.search(rb'^  "line": (\[\[[0-9, \[\]]*\]\]),$', head, re.MULTILINE)
    try:
        return None if found is None else parse_line(parse_json(found[1]))
    except (CheckpointError, ValueError):
        return None


def tensor_entry(tensor: SavedTensor) -> dict[str, Any]:
    pieces = []
    for piece in tensor.pieces:
        region = piece.region
        entry: dict[str, Any] = {"file": piece.file, "begin": region.begin, "end": region.end}
        cuts = [{"dim": dim, "spans": [list(span) for span in spans]} for dim, spans in region.cuts]
        entry |= cuts[0] if len(cuts) == 1 else {"cuts": cuts} if cuts else {}
        pieces.append(entry if region.order is None else {**entry, "order": list(region.order)})
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": pieces}


def parse_tensor(entry: Mapping[str, Any]) -> SavedTensor:
    """Reads what ``tensor_entry`` gave. Raises one of ``MALFORMED`` for anything else."""
    shape, dtype = parse_shape(entry["shape"]), parse_dtype(entry["dtype"])
    size = math.prod(shape)
    pieces = tuple(SavedPiece(file=each["file"], region=_parse_region(shape, size, each)) for each in entry["pieces"])
    return SavedTensor(shape=shape, dtype=dtype, pieces=pieces)


def parse_dtype(value: Any) -> str:
    """Returns the code of a dtype. Raises ValueError for one that is not known."""
    if value not in ITEM_BYTES:
        raise ValueError(f"dtype {str(value)[:20]} is not known here; known are {', '.join(ITEM_BYTES)}")
    return str(value)


def reason_of(error: Exception) -> str:
    """Returns why something that was read is malformed: a sentence of ours, or the error with its type."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def parse_shape(value: Any) -> tuple[int, ...]:
    """Returns a shape. Raises ValueError for anything else, and for one with more than 2^60 elements."""
    is_shape = isinstance(value, list) and len(value) <= _MOST_DIMS and all(is_count(size) for size in value)
    if not is_shape or math.prod(max(size, 1) for size in value) > 2**60:
        raise ValueError(f"a shape is a list of up to {_MOST_DIMS} sizes, with up to 2^60 elements")
    return tuple(value)


def overlaps(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns what neighbours among intervals share; nothing where none of them overlap."""
    ordered = sorted(each for each in intervals if each[0] < each[1])
    return [(right[0], min(left[1], right[1])) for left, right in itertools.pairwise(ordered) if right[0] < left[1]]


def _parse_region(shape: tuple[int, ...], size: int, entry: Mapping[str, Any]) -> Region:
    begin, end = entry["begin"], entry["end"]
    if entry.keys().isdisjoint(_CUT_KEYS):  # most of them, and there may be many
        if type(begin) is int and type(end) is int and 0 <= begin <= end <= size:
            return Region(shape=shape, begin=begin, end=end)
        raise ValueError(f"a piece is no interval of {size} elements")
    order = entry.get("order")
    if order is not None and sorted(order) != list(range(len(shape))):
        raise ValueError(f"an order names each of {len(shape)} dims once")
    cuts = tuple(_parse_cut(shape, each) for each in entry.get("cuts", [entry] if "spans" in entry else []))
    if len({dim for dim, _ in cuts}) < len(cuts) or ("dim" in entry and "spans" not in entry):
        raise ValueError("a cut is a dim with its spans, and a dim is cut once")
    begin, end, order = _count("begin", begin), _count("end", end), None if order is None else tuple(order)
    region = Region(shape=shape, begin=begin, end=end, cuts=cuts, order=order)
    if not region.begin <= region.end <= math.prod(region.local_shape):
        raise ValueError(f"a piece from {region.begin} to {region.end} of {math.prod(region.local_shape)} elements")
    return region


def _parse_cut(shape: tuple[int, ...], entry: Mapping[str, Any]) -> tuple[int, Spans]:
    dim = _count("dim", entry["dim"], len(shape) - 1)
    most = shape[dim]
    spans = tuple((_count("a span", first, most), _count("a span", last, most)) for first, last in entry["spans"])
    if any(last < first for first, last in spans):
        raise ValueError("spans are those of a dim, each from its first to its last")
    return dim, spans


def _table(rows: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"    {_dump(name)}: {_dump(rows[name])}" for name in rows)
    return f"{{\n{lines}\n  }}" if rows else "{}"


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


class HasShards(Protocol):
    """Whoever holds parameters and buffers, such as an engine."""

    @property
    def world(self) -> Communicator:
        """All ranks that train together."""

    def shards(self) -> Iterator[Shard]:
        """Yields what this rank holds."""

    def state_names(self) -> Collection[str]:
        """Returns the names of all that ranks together hold."""

    def mark_loaded(self) -> None:
        """Notes that the shards have new values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """This rank's part of a state. No tensor is copied: it is that of the step as long as nobody trains on.

    ``values`` are the same on every rank, ``own`` this rank's; ``found`` are known to some ranks, and those of all are
    kept. ``line`` is how the run came to this step, as rank 0 knows it; None: it follows from what lies in the folder.
    """

    step: int
    position: int
    shards: Sequence[Shard] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    line: Line | None = None


def prefixed(prefix: str, shards: Iterable[Shard]) -> list[Shard]:
    return [replace(shard, name=f"{prefix}{shard.name}") for shard in shards]


def merge_parts(parts: Mapping[str, bytes], plain: State | Manifest) -> Manifest:
    """Returns the manifest of what all ranks have written, by the names of the files in which they say so.

    Raises CheckpointError where they differ, and one of ``MALFORMED`` where one of them is no such file.
    """
    files: dict[str, SavedFile] = {}
    tensors: dict[str, SavedTensor] = {}
    found: dict[str, Any] = {}
    for name, text in parts.items():
        part = parse_json_object(text)
        if part.get("step", plain.step) != plain.step:  # old ones do not say
            raise CheckpointError(f"{name} is of step {part['step']}, and not of step {plain.step}")
        files[name] = SavedFile(num_bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
        files |= parse_files(part["files"])
        for each, entry in part["tensors"].items():
            new = parse_tensor(entry)
            known = tensors.setdefault(each, new)
            if (known.shape, known.dtype) != (new.shape, new.dtype):
                kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (known, new)]
                raise CheckpointError(f"{each} is {kinds[0]} on one rank and {kinds[1]} on another")
            regions = {piece.region for piece in known.pieces}
            more = tuple(piece for piece in new.pieces if piece.region not in regions)
            tensors[each] = replace(known, pieces=known.pieces + more)
        found |= part["found"]
    return Manifest(
        step=plain.step,
        position=plain.position,
        world=len(parts),
        tensors=dict(sorted(tensors.items())),
        files=files,
        values=plain.values,
        found=dict(sorted(found.items())),
        about=plain.about,
        line=plain.line or Line(),
    )


def head_text(state: State, world: int) -> str:
    """Returns what rank 0 writes beside its part of a snapshot: a manifest without tensors, and without hashes."""
    files = {f"rank-{rank:05d}.json": SavedFile(num_bytes=0, sha256="") for rank in range(world)}
    told: dict[str, Any] = {name: getattr(state, name) for name in ("step", "position", "values", "about")}
    return manifest_text(Manifest(world=world, tensors={}, files=files, line=state.line or Line(), **told))
