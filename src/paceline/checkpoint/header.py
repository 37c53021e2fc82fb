"""The header of a safetensors file: which tensors it has, and where their bytes are.

    | length of the header, 8 bytes | header: JSON, name -> dtype, shape, offsets | bytes of the tensors, in order |

A header is input. It has at most 100 MB, as in the format's own library; every tensor lies within the file, at the size
that its shape and dtype have, and no byte belongs to two of them. So whoever reads it allocates no more than the file
has. No torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import ITEM_BYTES, MALFORMED, overlaps, parse_dtype, parse_shape, reason_of
from paceline.checkpoint.storage import FileStore, cannot_read
from paceline.errors import CheckpointError
from paceline.untrusted import is_count, parse_json_object

_MOST_BYTES = 100_000_000
_METADATA = "__metadata__"


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
        return _parse_header(storage, path)
    except OSError as error:
        raise cannot_read(path, error) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: {error}\n  it begins with a header, and that with its size\n"
            "  use an older checkpoint; or check the path and --format, copy or download it again"
        ) from error


def _parse_header(storage: FileStore, path: Path) -> Header:
    total = storage.size(path) or 0
    if total < 8:
        raise ValueError(f"it has {total} bytes")
    length = bytearray(8)
    try:
        storage.read_into(path, [(0, memoryview(length))])
        (size,) = struct.unpack("<Q", length)
        if size > min(total - 8, _MOST_BYTES):
            raise ValueError(f"a header of {size:,} bytes in a file of {total:,}")
        text = bytearray(size)
        storage.read_into(path, [(8, memoryview(text))])
    except EOFError as error:
        raise ValueError(str(error)) from error
    found = parse_json_object(text)
    texts = found.pop(_METADATA, {})
    if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
        raise ValueError(f"{_METADATA} is texts by name")
    tensors = {name: _place(name, entry, 8 + size, total) for name, entry in found.items()}
    if overlaps([(place.begin, place.end) for place in tensors.values()]):
        raise ValueError("two of its tensors share bytes")
    return Header(tensors=tensors, metadata=texts)


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
