"""Tensors in safetensors files, written as a stream and read in ranges.

    | length of the header, 8 bytes | header: JSON, name -> dtype, shape, offsets | bytes of the tensors, in order |

A writer needs the sizes first, which it knows, and then one chunk of one tensor at a time. A reader needs the header,
and then the ranges of bytes that it wants. Any other program for this format reads the files, too.

Plain values are kept as JSON, exactly: numbers, texts, lists, tuples, dicts with any of these as keys, small tensors.
Nothing else is taken, so that reading a checkpoint never runs code of whoever wrote it.

    7, "a", [1, 2]          themselves
    (1, 2)                  {"tuple": [1, 2]}
    nan, inf                {"float": "nan"}
    {"a": 1}, {3: 1}        {"dict": [["a", 1]]}, {"dict": [[3, 1]]}
    a tensor                {"tensor": "<base64>", "dtype": "F32", "shape": [2]}
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from paceline.checkpoint.manifest import damaged
from paceline.checkpoint.storage import FileStore, cannot_read
from paceline.errors import CheckpointError, UsageError
from paceline.shards import Region, Runs

CHUNK_BYTES = 2**24
NO_HEADER = (EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError)
Progress: TypeAlias = Callable[[int], None]  # hears of bytes that were read or written
_GAP_BYTES = 2**16  # a gap of less than this is read too, in one go with what is around it
_LONG_BYTES = 2**20  # a run of so many goes straight to where it belongs
_SHORT = 64  # elements: runs of fewer are scattered all at once
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def dtype_code(dtype: torch.dtype) -> str:
    """Returns the format's name of a dtype. Raises UsageError for one that it has not."""
    if dtype not in _CODES:
        known = ", ".join(str(each).removeprefix("torch.") for each in _CODES)
        raise UsageError(f"a tensor of {dtype} cannot be saved\n  safetensors has {known}\n  cast it first")
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """Returns the dtype of a name. Raises CheckpointError for one that is not known."""
    if code not in _DTYPES:
        raise CheckpointError(f"dtype {code} is not known here; known are {', '.join(_DTYPES)}")
    return _DTYPES[code]


def ignore_progress(num_bytes: int) -> None:
    """Discards progress updates."""
    del num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A tensor that is read when it is needed: ``read`` yields its bytes in row-major order, part by part."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Iterator[memoryview]]

    @property
    def num_bytes(self) -> int:
        """How large it is."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> torch.Tensor:
        """Returns the tensor itself: all of it in memory."""
        flat = torch.empty(math.prod(self.shape), dtype=self.dtype)
        if flat.numel() == 0:
            return flat.view(self.shape)
        place, memory = 0, host_bytes(flat)
        for part in self.read():
            memory[place : place + len(part)] = part
            place += len(part)
        assert place == len(memory), (self.name, place, len(memory))
        return flat.view(self.shape)


def flat_view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Returns the elements of what is held of a region, in its order; without a copy where they lie in memory so."""
    found = tensor.detach()
    if region.order is not None and tuple(tensor.shape) == region.local_shape:  # else a flat piece of it
        found = found.permute(region.order)
    return found.reshape(-1).contiguous()  # a view with holes counts as flat to torch


def file_chunks(
    streams: Sequence[Stream], metadata: Mapping[str, str] | None = None, progress: Progress = ignore_progress
) -> Iterator[memoryview | bytes]:
    """Yields the bytes of a file. Beside the tensors themselves, one chunk is in memory."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for stream in streams:
        end = offset + stream.num_bytes
        entry = {"dtype": dtype_code(stream.dtype), "shape": list(stream.shape), "data_offsets": [offset, end]}
        header[stream.name], offset = entry, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for stream in streams:
        written = 0
        for part in stream.read():
            yield part
            progress(len(part))
            written += len(part)
        if written != stream.num_bytes:
            raise CheckpointError(f"{stream.name} gave {written:,} bytes, and its shape has {stream.num_bytes:,}")


def tensor_chunks(flat: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a flat tensor, chunk by chunk, from the host."""
    count = max(CHUNK_BYTES // flat.element_size(), 1)
    for first in range(0, flat.numel(), count):
        yield host_bytes(flat[first : first + count].cpu())


def host_bytes(flat: torch.Tensor) -> memoryview:
    """Returns the memory of a flat tensor on the host, to read from and to write into."""
    return flat.view(torch.uint8).numpy().data


def parse_header(storage: FileStore, path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a file, and where its tensors' bytes begin. Raises one of ``NO_HEADER`` for other files."""
    total = storage.size(path)
    if total is not None and total < 8:
        raise ValueError(f"it has {total} bytes")
    length = bytearray(8)
    storage.read_into(path, [(0, memoryview(length))])
    (size,) = struct.unpack("<Q", length)
    if total is None or size > total:
        raise ValueError(f"a header of {size} bytes in a file of {total}")
    text = bytearray(size)
    storage.read_into(path, [(8, memoryview(text))])
    return json.loads(text), 8 + size


def read_header(storage: FileStore, path: Path) -> dict[str, tuple[int, int]]:
    """Returns where in a file each tensor's bytes begin and end. Raises CheckpointError for another kind of file."""
    try:
        header, start = parse_header(storage, path)
        offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return {name: (start + first, start + last) for name, (first, last) in offsets.items()}
    except OSError as error:
        raise cannot_read(path, error) from error
    except NO_HEADER as error:
        raise damaged(f"{path} is not a file of tensors: {error}") from error


def read_runs(storage: FileStore, path: Path, start: int, runs: Runs, out: memoryview, itemsize: int) -> None:
    """Fills ``out`` with runs of a tensor whose bytes begin at ``start``: ``ours`` in it, ``theirs`` in the file."""
    if len(runs.length) == 0:
        return
    windows = _windows(runs, itemsize)
    single = [window.start for window in windows if window.stop - window.start == 1]
    places = ((int(runs.theirs[i]), int(runs.ours[i]), int(runs.length[i])) for i in single)
    storage.read_into(path, ((start + at * itemsize, _part(out, to, length, itemsize)) for at, to, length in places))
    for window in windows:
        if window.stop - window.start > 1:
            _read_window(storage, path, start, Runs(*(part[window] for part in runs)), out, itemsize)


def _part(out: memoryview, first: int, length: int, itemsize: int) -> memoryview:
    return out[first * itemsize : (first + length) * itemsize]


def _windows(runs: Runs, itemsize: int) -> list[slice]:
    """Groups short runs that lie near one another in the file, up to about a chunk in size."""
    begin, end = runs.theirs * itemsize, (runs.theirs + runs.length) * itemsize
    is_long = runs.length * itemsize >= _LONG_BYTES
    is_far = begin[1:] - end[:-1] > _GAP_BYTES
    cuts = is_long[1:] | is_long[:-1] | is_far | (begin[1:] // CHUNK_BYTES != begin[:-1] // CHUNK_BYTES)
    edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(begin)]
    return [slice(first, last) for first, last in itertools.pairwise(edges)]


def _read_window(storage: FileStore, path: Path, start: int, runs: Runs, out: memoryview, itemsize: int) -> None:
    """Reads what is around some runs in one go, and takes them out of it."""
    first, last = int(runs.theirs[0]), int(runs.theirs[-1] + runs.length[-1])
    window = bytearray((last - first) * itemsize)
    storage.read_into(path, [(start + first * itemsize, memoryview(window))])
    if runs.length.mean() < _SHORT:
        target = np.frombuffer(out, dtype=np.uint8).reshape(-1, itemsize)
        source = np.frombuffer(window, dtype=np.uint8).reshape(-1, itemsize)
        steps = np.arange(int(runs.length.sum())) - np.repeat(np.cumsum(runs.length) - runs.length, runs.length)
        target[np.repeat(runs.ours, runs.length) + steps] = source[np.repeat(runs.theirs - first, runs.length) + steps]
        return
    view = memoryview(window)
    for ours, theirs, length in zip(*(part.tolist() for part in runs), strict=True):
        _part(out, ours, length, itemsize)[:] = _part(view, theirs - first, length, itemsize)


def shown_shape(region: Region) -> tuple[int, ...]:
    """Returns the shape that a piece is stored in: that of the part itself where it is one, else flat."""
    return region.local_shape if region.is_whole_part else (region.size,)


def encode(value: Any, where: str = "the state") -> Any:
    """Returns a value as JSON values. Raises CheckpointError, naming the place, for what cannot be saved."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, where), encode(each, f"{where}.{key}")] for key, each in value.items()]}
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        text = base64.b64encode(host_bytes(flat)).decode("ascii") if flat.numel() else ""
        return {"tensor": text, "dtype": dtype_code(value.dtype), "shape": list(value.shape)}
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which cannot be saved\n"
        "  a checkpoint holds tensors, numbers, texts, lists, tuples and dicts\n  leave it out, or make it one of these"
    )


def decode(value: Any) -> Any:
    """Returns what ``encode`` was given."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        raw = bytearray(base64.b64decode(value["tensor"]))
        dtype = dtype_of(value["dtype"])
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    if "float" in value:
        return float(value["float"])
    return {decode(key): decode(each) for key, each in value["dict"]}
