"""Tensors in safetensors files , written as a stream and read in ranges; and plain values (``formats.py``).

A writer needs the sizes first, which it knows, and then one chunk of one tensor at a time. A reader needs the header,
and then the ranges of bytes that it wants.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from paceline.checkpoint.formats import decode_with
from paceline.checkpoint.storage import FileStore
from paceline.errors import CheckpointError, UsageError
from paceline.shards import Region, Runs, Shard, whole_region

CHUNK_BYTES = 2**24
Progress: TypeAlias = Callable[[int], None]  # hears of bytes that were read or written
_GAP_BYTES = 2**16  # a gap of less than this is read too, in one go with what is around it
_LONG_BYTES = 2**20  # a run of so many goes straight to where it belongs
_MOST_LEVELS = 50  # of values within values; each takes up to three of JSON
_SHORT = 64  # elements: runs of fewer are scattered all at once
# By the format's names, which are those of ``ITEM_BYTES`` in ``manifest.py``: no other is ever read.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(dtype: torch.dtype) -> str:
    """Returns the format's name of a dtype. Raises UsageError for one that it has not."""
    if dtype not in _CODES:
        known = ", ".join(str(each).removeprefix("torch.") for each in _CODES)
        raise UsageError(f"a tensor of {dtype} cannot be saved\n  safetensors has {known}\n  cast it first")
    return _CODES[dtype]


def ignore_progress(_: int) -> None:
    """Discards progress updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A tensor, or a region of one, that is read when needed: ``read`` yields its bytes in order, part by part.

    ``narrow`` returns some of its elements, which are read without those before them; None: it is read as a whole.
    """

    name: str
    region: Region
    dtype: torch.dtype
    read: Callable[[], Iterator[memoryview]]
    narrow: Callable[[int, int], Stream] | None = None

    @classmethod
    def of(cls, shard: Shard) -> Stream:
        read = partial(tensor_chunks, shard.tensor)
        return cls(name=shard.name, region=shard.region, dtype=shard.tensor.dtype, read=read)

    @classmethod
    def made(cls, name: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Stream:
        """Returns a tensor that is made when it is read."""

        def read() -> Iterator[memoryview]:
            yield from tensor_chunks(make().detach().to(dtype).contiguous().reshape(-1))

        return cls(name=name, region=whole_region(shape), dtype=dtype, read=read)

    @property
    def shape(self) -> tuple[int, ...]:
        """What it is stored as: the shape of the part itself where it is one, else flat."""
        return self.region.local_shape if self.region.is_whole_part else (self.region.size,)

    @property
    def num_bytes(self) -> int:
        return self.region.size * self.dtype.itemsize

    def whole(self) -> torch.Tensor:
        flat = torch.empty(math.prod(self.shape), dtype=self.dtype)
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
    end = 0
    for stream in streams:
        begin, end = end, end + stream.num_bytes
        entry = {"dtype": dtype_code(stream.dtype), "shape": list(stream.shape), "data_offsets": [begin, end]}
        header[stream.name] = entry
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
    count = max(CHUNK_BYTES // flat.element_size(), 1)
    for first in range(0, flat.numel(), count):
        yield host_bytes(flat[first : first + count].cpu())


def host_bytes(flat: torch.Tensor) -> memoryview:
    """Returns the memory of a flat tensor on the host, to read from and to write into."""
    return flat.view(torch.uint8).numpy().data


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


def encode(value: Any, where: str = "the state", level: int = 0) -> Any:
    """Returns a value as JSON values. Raises CheckpointError, naming the place, for what cannot be saved."""
    if level > _MOST_LEVELS:
        what = f"{where[:60]}... is nested more than {_MOST_LEVELS} levels deep"
        raise CheckpointError(f"{what}\n  such a value could not be read back\n  leave it out, or make it flatter")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [encode(each, f"{where}[{index}]", level + 1) for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": encode(list(value), where, level)}
    if isinstance(value, dict):
        pairs = [(encode(key, where, level + 1), key, each) for key, each in value.items()]
        return {"dict": [[name, encode(each, f"{where}.{key}", level + 1)] for name, key, each in pairs]}
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        text = base64.b64encode(host_bytes(flat)).decode("ascii") if flat.numel() else ""
        return {"tensor": text, "dtype": dtype_code(value.dtype), "shape": list(value.shape)}
    what = f"{where} is of type {type(value).__name__}, which cannot be saved"
    rule = "a checkpoint holds tensors, numbers, texts, lists, tuples and dicts"
    raise CheckpointError(f"{what}\n  {rule}\n  leave it out, or make it one of these")


def decode(value: Any) -> Any:
    """Returns what ``encode`` was given. Raises CheckpointError for what it never gave."""
    return decode_with(value, _tensor)


def _tensor(raw: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = DTYPES[dtype]
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(kind) if raw else torch.empty(0, dtype=kind)
    return flat.reshape(shape)
