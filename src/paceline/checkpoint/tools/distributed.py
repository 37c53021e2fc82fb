"""torch's distributed checkpoints (DCP): written so that ``torch.distributed.checkpoint.load`` reads them, and read.

    {"model": {name: tensor}, "optim": {"state": {name: {...}}, "param_groups": [...]}}

torch plans an export with the shapes, and asks for each tensor when it is its turn; each is a file of its own, since
torch keeps what it has written to a file until that is done. What is taken in is read here, chunk by chunk. Memory: the
largest tensor and a chunk of it.

The file ``.metadata`` is a pickle, which torch itself would run whatever it names of. Here it may name torch's own
records of metadata and nothing else; and what these say is checked against the files before memory is made for it:
names without paths, intervals inside the files, of which no byte belongs to two tensors, chunks that make up each
tensor once. It is read only where the user allows pickles.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.checkpoint.manifest import MALFORMED, overlaps, parse_shape
from paceline.checkpoint.storage import cannot_read
from paceline.checkpoint.tensors import Progress, Stream, dtype_code, ignore_progress
from paceline.errors import CheckpointError, UsageError
from paceline.untrusted import file_inside, is_count, read_regular

FILE = ".metadata"
_MOST_BYTES = 2**28
_MOST_CHUNKS = 1024  # of a tensor that is cut along several dims: each is compared with each
_RECORDS = ["Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"]
_RECORDS += ["TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"]
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # where torch had some of them up to 2.3
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


def write_distributed(path: Path, content: Mapping[str, Any], progress: Progress = ignore_progress) -> None:
    """Writes nested dicts of streams, tensors and plain values as a distributed checkpoint."""
    streams: dict[int, Stream] = {}
    shapes = _shapes(content, streams)
    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=1, sync_files=True)
    with warnings.catch_warnings():  # there is one process, and that is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(shapes, storage_writer=writer, planner=_Planner(streams, progress), no_dist=True)
        except CheckpointException as error:  # no Exception: nothing further out would catch it
            cause: BaseException = next(iter(error.failures.values()))[0]
            if isinstance(cause, CheckpointError | OSError):
                raise cause from error
            what = f"torch's distributed checkpoint cannot be written: {str(cause).splitlines()[0]}"
            fix = "look whether its disk has room, or name another place"
            raise CheckpointError(f"{what}\n  torch could not write all of a file\n  {fix}") from error


def read_distributed(path: Path) -> dict[Any, Any]:
    """Returns what a distributed checkpoint has: nested dicts (lists are such by number) of streams and values."""
    try:
        metadata = read_metadata(path)
    except FileNotFoundError as error:
        what = f"{path} is no distributed checkpoint of torch: it has no {FILE}"
        raise CheckpointError(f"{what}\n  that is written last\n  check the path, or leave --format out") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    except (*MALFORMED, EOFError, RuntimeError, PickleError, ImportError, MemoryError, UsageError) as error:
        raise _damaged(path / FILE, error) from error
    places, infos = metadata.planner_data or {}, {}
    for index, info in metadata.storage_data.items():
        infos[index.fqn, None if index.offset is None else tuple(index.offset)] = info
    found: dict[Any, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        *outer, last = places.get(name, (name,))
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise _damaged(path / FILE, f"{name} lies inside of a value")
        if isinstance(entry, TensorStorageMetadata):
            chunks = [(each, infos[name, tuple(each.offsets)]) for each in entry.chunks]
            read = partial(_read_tensor, path, entry, chunks)
            inner[last] = Stream.made(name, tuple(entry.size), entry.properties.dtype, read)
        else:
            inner[last] = _load(path, infos[name, None])
    return found


def _read_tensor(path: Path, entry: TensorStorageMetadata, chunks: Sequence[tuple[Any, Any]]) -> torch.Tensor:
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk, info in chunks:
        part = _load(path, info)
        if not isinstance(part, torch.Tensor) or part.shape != chunk.sizes:
            raise _damaged(path / info.relative_path, "a chunk of a tensor is something else")
        whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = part
    return whole


def _load(path: Path, info: Any) -> Any:
    """Returns what lies in an interval of a file, as torch reads weights: tensors and plain values, and never code."""
    try:
        with file_inside(path, info.relative_path).open("rb") as file:
            return torch.load(FileSystemReader(path)._slice_file(file, info), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise _damaged(path, f"{info.relative_path} is missing") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    except (*MALFORMED, EOFError, RuntimeError, PickleError, ImportError, MemoryError) as error:
        raise _damaged(path, error) from error


class _Planner(DefaultSavePlanner):
    """Plans with tensors that have shapes alone, and reads their values when they are written."""

    def __init__(self, streams: Mapping[int, Stream], progress: Progress) -> None:
        super().__init__()
        self._streams = streams
        self._progress = progress

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002  (torch's name)
        stream = self._streams.get(id(object))
        if stream is None:
            return super().transform_object(write_item, object)
        self._progress(stream.num_bytes)
        return stream.whole()


def _shapes(value: Any, streams: dict[int, Stream]) -> Any:
    """Returns a structure with a tensor without values for each stream; notes which is whose."""
    if isinstance(value, Mapping):
        return {key: _shapes(each, streams) for key, each in value.items()}
    if not isinstance(value, Stream):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
    streams[id(tensor)] = value
    return tensor


def _damaged(path: Path, why: BaseException | str) -> CheckpointError:
    reason = (str(why).splitlines() or [type(why).__name__])[0].partition(". ")[0]  # torch goes on with guesses
    rule = "every file that torch.distributed.checkpoint wrote is needed, whole"
    return CheckpointError(f"{path} is damaged: {reason}\n  {rule}\n  copy the folder again, or use another checkpoint")


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
    found = _Unpickler(io.BytesIO(read_regular(file_inside(path, FILE), _MOST_BYTES))).load()
    if not isinstance(found, Metadata):
        raise ValueError("it is not metadata")
    state, storage = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(state, dict) or not isinstance(storage, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError("it has no tables of tensors and files by name")
    sizes = _interval_sizes(path, storage)
    for name, entry in state.items():
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
        raise ValueError(f"a tensor has {len(boxes)} chunks along several dims, and {_MOST_CHUNKS} are the most")
    return any(
        all(a < b + size and b < a + length for a, length, b, size in zip(*left, *right, strict=True))
        for left, right in itertools.combinations(boxes, 2)
    )
