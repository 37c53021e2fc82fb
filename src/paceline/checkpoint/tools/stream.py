"""Tensors as streams of bytes: read from a checkpoint window by window, written to a safetensors file as they come.

Memory: some windows of 8 MiB, whatever the size of a tensor or of the checkpoint.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from paceline.checkpoint.manifest import SavedFile
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tensors import dtype_code, host_bytes
from paceline.errors import CheckpointError
from paceline.shards import Region, whole_region

WINDOW_BYTES = 2**23
_SCATTERED = 2**18  # elements of a window where memory lies in another order, and each is looked up by itself

Tell: TypeAlias = Callable[[int], None]


def be_silent(num_bytes: int) -> None:
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


def stream_region(
    checkpoint: Checkpoint, name: str, region: Region | None = None, count: int | None = None
) -> Iterator[torch.Tensor]:
    """Yields a region of a tensor (or all of it, row by row) as flat windows, one of which is in memory at a time."""
    wanted = whole_region(checkpoint.manifest.tensors[name].shape) if region is None else region
    step = window_elements(checkpoint, name, region) if count is None else count
    for first in range(0, wanted.size, step):
        yield checkpoint.read(name, wanted.narrow(first, min(first + step, wanted.size)))


def window_elements(checkpoint: Checkpoint, name: str, region: Region | None = None) -> int:
    """Returns how many elements of a tensor are read at a time."""
    order = None if region is None else region.order
    if any(piece.region.order != order for piece in checkpoint.manifest.tensors[name].pieces):
        return _SCATTERED
    return max(WINDOW_BYTES // checkpoint.dtype(name).itemsize, 1)


def stream_saved(checkpoint: Checkpoint, name: str, under: str | None = None) -> Stream:
    """Returns a saved tensor as a stream, ``under`` another name if one is given."""
    return Stream(
        name=name if under is None else under,
        shape=checkpoint.manifest.tensors[name].shape,
        dtype=checkpoint.dtype(name),
        read=lambda: (host_bytes(window) for window in stream_region(checkpoint, name)),
    )


def stream_made(name: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Stream:
    """Returns a tensor that is made when it is read, as a stream."""

    def read() -> Iterator[memoryview]:
        flat = make().detach().to(dtype).contiguous().reshape(-1)
        step = max(WINDOW_BYTES // dtype.itemsize, 1)
        for first in range(0, flat.numel(), step):
            yield host_bytes(flat[first : first + step])

    return Stream(name=name, shape=tuple(shape), dtype=dtype, read=read)


def write_safetensors(
    storage: Storage,
    path: Path,
    streams: Sequence[Stream],
    metadata: Mapping[str, str] | None = None,
    tell: Tell = be_silent,
) -> SavedFile:
    """Writes streams as one safetensors file. Wide dtypes come first, so that all lie where processors want them."""
    ordered = sorted(streams, key=lambda stream: -stream.dtype.itemsize)
    return storage.write(path, _file_parts(ordered, metadata, tell))


def _file_parts(
    streams: Sequence[Stream], metadata: Mapping[str, str] | None, tell: Tell
) -> Iterator[memoryview | bytes]:
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
            tell(len(part))
            written += len(part)
        if written != stream.num_bytes:
            raise CheckpointError(f"{stream.name} gave {written:,} bytes, and its shape has {stream.num_bytes:,}")
