"""What files of a checkpoint are written in: plain values as JSON, tensors as safetensors. Both are input; no torch.

Values are numbers, texts, lists, tuples, dicts with any of these as keys, and small tensors, exactly. Nothing else is
taken, so that reading a checkpoint never runs code of whoever wrote it.

    7, "a", [1, 2]          themselves
    (1, 2)                  {"tuple": [1, 2]}
    nan, inf                {"float": "nan"}
    {"a": 1}, {3: 1}        {"dict": [["a", 1]]}, {"dict": [[3, 1]]}
    a tensor                {"tensor": "<base64>", "dtype": "F32", "shape": [2]}

A safetensors file begins with a header that says which tensors it has, and where their bytes are:

    | length of the header, 8 bytes | header: JSON, name -> dtype, shape, offsets | bytes of the tensors, in order |

It has at most 100 MB, as in the format's own library; every tensor lies within the file, at the size that its shape and
dtype have, and no byte belongs to two of them. So whoever reads it allocates no more than the file has.

Whether every element of a tensor is in exactly one piece is asked before anything is read: what is missing would be
read as zeros, and written on with good hashes. Pieces that are cut alike (the same spans of the same dims) are
intervals of one part of the tensor: these must not overlap, nor may the spans of the parts; then the number of elements
says whether something is missing. Cost: one sort of the pieces of each tensor.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import (
    COMPRESSION,
    ITEM_BYTES,
    MALFORMED,
    OPTIMIZER,
    Manifest,
    SavedTensor,
    damaged,
    overlaps,
    parse_dtype,
    parse_shape,
    reason_of,
)
from paceline.checkpoint.storage import FileStore, cannot_read, file_in
from paceline.errors import CheckpointError
from paceline.shards import Region, Spans
from paceline.untrusted import is_count, parse_json_object

GROUP = "group/"
REST = "optimizer"
Cuts = tuple[tuple[int, Spans], ...]
MakeTensor = Callable[[bytearray, str, tuple[int, ...]], Any]
_MOST_BYTES = 100_000_000
_METADATA = "__metadata__"


def decode_with(value: Any, make_tensor: MakeTensor | None = None) -> Any:
    """Returns what was saved, sizes for tensors without ``make_tensor``. Raises CheckpointError for anything else."""
    try:
        return _decode(value, make_tensor)
    except (*MALFORMED, RecursionError) as error:
        raise damaged(f"a value of a checkpoint is damaged: {type(error).__name__}: {error}") from error


def check_found(found: dict[str, Any]) -> dict[str, Any]:
    """Returns decoded ``found``. Raises CheckpointError where it is not what an optimizer's state is saved as."""
    for name, entry in found.items():
        is_right = True
        if name.startswith(GROUP):
            is_right = isinstance(entry, dict) and all(isinstance(key, str) for key in entry)
        elif name == REST:
            is_right = isinstance(entry, dict) and all(isinstance(entry.get(key), dict) for key in ("state", "beside"))
        elif name.startswith(OPTIMIZER):
            label = entry.get("group") if isinstance(entry, dict) else None
            is_right = isinstance(label, str) and label in found and isinstance(entry.get("values"), dict)
            is_right = is_right and all(isinstance(key, str) for key in entry["values"])
        if not is_right:
            raise damaged(f"what a checkpoint has of {name} is no state of an optimizer")
    return found


def _decode(value: Any, make_tensor: MakeTensor | None) -> Any:
    if isinstance(value, list):
        return [_decode(each, make_tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        raw, dtype, shape = bytearray(base64.b64decode(value["tensor"])), value["dtype"], parse_shape(value["shape"])
        if len(raw) != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{len(raw):,} bytes for {dtype} {list(shape)}")
        return (len(raw), dtype, shape) if make_tensor is None else make_tensor(raw, dtype, shape)
    if "tuple" in value:
        return tuple(_decode(each, make_tensor) for each in value["tuple"])
    if "float" in value:
        return float(value["float"])
    return {_decode(key, make_tensor): _decode(each, make_tensor) for key, each in value["dict"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor in a file: its bytes begin and end there."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file says of itself: its tensors by name, and texts by name."""

    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]


def read_header(storage: FileStore, path: Path) -> Header:
    """Reads the header of a file. Raises CheckpointError for another kind of file."""
    try:
        total, length = storage.size(path) or 0, bytearray(8)
        if total < 8:
            raise ValueError(f"it has {total} bytes")
        storage.read_into(path, [(0, memoryview(length))])
        (size,) = struct.unpack("<Q", length)
        if size > min(total - 8, _MOST_BYTES):
            raise ValueError(f"a header of {size:,} bytes in a file of {total:,}")
        text = bytearray(size)
        storage.read_into(path, [(8, memoryview(text))])
        found = parse_json_object(text)
        texts = found.pop(_METADATA, {})
        if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
            raise ValueError(f"{_METADATA} is texts by name")
        tensors = {name: _place(name, entry, 8 + size, total) for name, entry in found.items()}
        if overlaps([(place.begin, place.end) for place in tensors.values()]):
            raise ValueError("two of its tensors share bytes")
        return Header(tensors=tensors, metadata=texts)
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, EOFError) as error:
        what = f"{path} is not a safetensors file: {error}"
        fix = "use an older checkpoint; or check the path and --format, copy or download it again"
        raise CheckpointError(f"{what}\n  it begins with a header, and that with its size\n  {fix}") from error


def _place(name: str, entry: Any, start: int, total: int) -> TensorPlace:
    try:
        dtype, shape, (first, last) = parse_dtype(entry["dtype"]), parse_shape(entry["shape"]), entry["data_offsets"]
    except MALFORMED as error:
        raise ValueError(f"{name[:200]}: {reason_of(error)}") from error
    if not (is_count(first) and is_count(last)) or last - first != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name[:200]}: its offsets are not those of {dtype} {list(shape)}")
    if start + last > total:
        raise ValueError(f"it is cut short: it has {total:,} bytes, and {name[:200]} ends at {start + last:,}")
    return TensorPlace(dtype=dtype, shape=shape, begin=start + first, end=start + last)


def coverage_problems(name: str, tensor: SavedTensor) -> list[str]:
    """Returns what is missing of a tensor, or there twice."""
    size, regions = math.prod(tensor.shape), [piece.region for piece in tensor.pieces if piece.region.size]
    found, problems = sum(region.size for region in regions), []
    if found != size and not name.startswith(COMPRESSION):  # a rank may have no residual of compression
        problems.append(f"{found:,} of {size:,} elements are saved")
    parts: dict[Cuts, list[Region]] = {}
    for region in regions:
        parts.setdefault(region.cuts, []).append(region)
    for part in parts.values():
        if len({region.order for region in part}) > 1:
            problems.append("its pieces lie in different orders of dims")
        shared = overlaps([(region.begin, region.end) for region in part])
        problems += [f"elements {first:,} to {last:,} are saved twice" for first, last in shared]
    if len({tuple(dim for dim, _ in cuts) for cuts in parts}) > 1:
        return [*problems, "its pieces are cut along different dims"]
    rows = _row_overlaps(list(parts))
    return problems + [f"rows {first:,} to {last:,} of the dim that is cut are saved twice" for first, last in rows]


def _row_overlaps(parts: Sequence[Cuts]) -> list[tuple[int, int]]:
    """Returns which rows several parts have, of the first dim that is cut; within the same rows, of the next one."""
    within: dict[Spans, list[Cuts]] = {}
    for cuts in parts:
        if cuts:
            within.setdefault(cuts[0][1], []).append(cuts[1:])
    found = overlaps([span for spans in within for span in spans])
    return found + [each for inner in within.values() for each in _row_overlaps(inner)]


def piece_problems(path: Path, manifest: Manifest, storage: FileStore, skip: Collection[str] = ()) -> list[str]:
    """Returns which pieces are not in their files at their full size. ``skip``: files that are damaged anyway."""
    problems: list[str] = []
    headers: dict[str, Header] = {}
    for file in sorted({piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces} - set(skip)):
        try:
            headers[file] = read_header(storage, file_in(path, file))
        except CheckpointError as error:
            problems.append(str(error).splitlines()[0])
    for name, tensor in manifest.tensors.items():
        for piece in (piece for piece in tensor.pieces if piece.file in headers):
            place, wanted = headers[piece.file].tensors.get(name), piece.region.size * ITEM_BYTES[tensor.dtype]
            if place is None:
                problems.append(f"{piece.file} has no {name}")
            elif place.dtype != tensor.dtype:
                problems.append(f"{piece.file} has {name} as {place.dtype}, not {tensor.dtype}")
            elif place.num_bytes != wanted:
                problems.append(f"{piece.file} has {place.num_bytes:,} bytes of {name}, not {wanted:,}")
    return problems
