"""The file ``.metadata`` of torch's distributed checkpoints: a pickle, read with a closed list of what may be in it.

torch itself unpickles it without any limits, and so runs what it names. Here it may name torch's own records of
metadata and nothing else; and what these say is checked against the files before memory is made for it: names without
paths, intervals inside the files, of which no byte belongs to two tensors, chunks that make up each tensor once.

Read only where the user allows pickles.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from paceline.checkpoint.manifest import overlaps, parse_shape
from paceline.checkpoint.tensors import dtype_code
from paceline.untrusted import file_inside, is_count, read_regular

FILE = ".metadata"
_MOST_BYTES = 2**28
_MOST_CHUNKS = 1024  # of a tensor that is cut along several dims: each is compared with each
_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # where torch had some of them up to 2.3
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


class _Unpickler(pickle.Unpickler):
    """Knows the names that torch's metadata has, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == records.__name__ and name in _RECORDS:
            return getattr(records, name)
        if module == _OLDER and name in ("TensorProperties", "MEM_FORMAT_ENCODING"):
            return records.TensorProperties if name == "TensorProperties" else records._MEM_FORMAT_ENCODING
        if (module, name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):  # as Python 3.11 pickles a member of an enumeration
            return _member
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _joined
        raise pickle.UnpicklingError(f"it names {module}.{name}, which torch's metadata has not")


def _layout(name: object) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError("a layout that is not strided")
    return torch.strided


def _member(kind: object, name: object) -> Any:
    encoding = records._MEM_FORMAT_ENCODING
    if kind is not encoding or str(name) not in encoding.__members__:
        raise pickle.UnpicklingError("it asks for an attribute, which torch's metadata does not")
    return encoding[str(name)]


def _joined(*parts: object) -> str:
    return "/".join(map(str, parts))


def read_metadata(path: Path) -> Metadata:
    """Reads and checks the metadata of a folder. Raises OSError, ValueError or UnpicklingError if it is unusable."""
    text = read_regular(file_inside(path, FILE), _MOST_BYTES)
    found = _Unpickler(io.BytesIO(text)).load()
    if not isinstance(found, Metadata):
        raise ValueError("it is not metadata")
    state, storage = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(state, dict) or not isinstance(storage, dict):
        raise ValueError("it has no tables of tensors and files")
    sizes = _interval_sizes(path, storage)
    for name, entry in state.items():
        if not isinstance(name, str):
            raise ValueError("a name is not text")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, sizes)
        elif not isinstance(entry, records.BytesStorageMetadata) or (name, None) not in sizes:
            raise ValueError(f"{name} is neither a tensor nor a value in a file")
    for place in (getattr(found, "planner_data", None) or {}).values():  # the keys that lead to a value
        is_short = isinstance(place, tuple) and 0 < len(place) <= 64
        if not is_short or not all(isinstance(each, str | int) for each in place):
            raise ValueError("a key of a value is neither text nor a number")
    return found


def _interval_sizes(path: Path, storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], int]:
    """Returns how many bytes each piece has in its file. Raises ValueError where they are not there, or shared."""
    taken: dict[str, list[tuple[int, int]]] = {}
    found: dict[tuple[str, tuple[int, ...] | None], int] = {}
    for index, info in storage.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise ValueError("a place in a file is something else")
        if getattr(info, "transform_descriptors", None):
            raise ValueError("its files are compressed, which is not read here")
        begin, length = getattr(info, "offset", None), getattr(info, "length", None)
        if not is_count(begin) or not is_count(length):
            raise ValueError("a place in a file is no interval")
        taken.setdefault(getattr(info, "relative_path", ""), []).append((begin, begin + length))
        offset = getattr(index, "offset", None)
        found[str(index.fqn), None if offset is None else tuple(offset)] = length
    for name, intervals in taken.items():
        file = file_inside(path, name)
        if file.exists() and not file.is_file():
            raise ValueError(f"{name} is not a plain file")
        size = file.stat().st_size if file.exists() else None  # whoever reads it reports what is missing
        if size is not None and max(end for _, end in intervals) > size:
            raise ValueError(f"{name} has {size:,} bytes, and more are needed")
        if overlaps(intervals):
            raise ValueError(f"two pieces share bytes of {name}")
    return found


def _check_tensor(name: str, entry: Any, sizes: Mapping[tuple[str, tuple[int, ...] | None], int]) -> None:
    shape, item_bytes = parse_shape(list(entry.size)), torch.empty(0, dtype=entry.properties.dtype).element_size()
    dtype_code(entry.properties.dtype)
    boxes = [(parse_shape(list(chunk.offsets)), parse_shape(list(chunk.sizes))) for chunk in entry.chunks]
    for begin, extent in boxes:
        is_inside = len(begin) == len(extent) == len(shape)
        if not is_inside or any(first + size > whole for first, size, whole in zip(begin, extent, shape, strict=True)):
            raise ValueError(f"a chunk of {name} lies outside of it")
        if sizes.get((name, begin), -1) < math.prod(extent) * item_bytes:
            raise ValueError(f"a chunk of {name} is not in a file at its full size")
    if sum(math.prod(extent) for _, extent in boxes) != math.prod(shape) or _do_overlap(boxes, shape):
        raise ValueError(f"the chunks of {name} do not make it up once")


def _do_overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    boxes = sorted((begin, extent) for begin, extent in boxes if math.prod(extent))
    if all(extent[1:] == shape[1:] for _, extent in boxes):  # cut along the first dim
        return any(left[0][0] + left[1][0] > right[0][0] for left, right in itertools.pairwise(boxes) if shape)
    if len(boxes) > _MOST_CHUNKS:
        raise ValueError(
            f"a tensor is cut into {len(boxes)} chunks along several dims, and {_MOST_CHUNKS} are the most"
        )
    return any(
        all(a < b + size and b < a + length for a, length, b, size in zip(*left, *right, strict=True))
        for left, right in itertools.combinations(boxes, 2)
    )
