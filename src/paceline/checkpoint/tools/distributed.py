"""torch's distributed checkpoints (DCP): written so that ``torch.distributed.checkpoint.load`` reads them, and read.

    {"model": {name: tensor}, "optim": {"state": {name: {...}}, "param_groups": [...]}}

torch plans an export with the shapes, and asks for each tensor when it is its turn; each is a file of its own, since
torch keeps what it has written to a file until that is done. What is taken in is read here, chunk by chunk. Memory: the
largest tensor and a chunk of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.checkpoint.manifest import MALFORMED
from paceline.checkpoint.storage import cannot_read
from paceline.checkpoint.tensors import Progress, Stream, ignore_progress
from paceline.checkpoint.tools.dcp_metadata import FILE, read_metadata
from paceline.checkpoint.tools.stream import stream_made
from paceline.errors import CheckpointError, UsageError
from paceline.untrusted import file_inside


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
            raise CheckpointError(
                f"torch's distributed checkpoint cannot be written: {str(cause).splitlines()[0]}\n"
                "  torch could not write all of a file\n  look whether its disk has room, or name another place"
            ) from error


def read_distributed(path: Path) -> dict[Any, Any]:
    """Returns what a distributed checkpoint has: nested dicts (lists are such by number) of streams and values.

    Its files are pickles. They are read as torch's metadata, tensors and plain values; anything else is refused.
    """
    try:
        metadata = read_metadata(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is no distributed checkpoint of torch: it has no {FILE}\n"
            "  torch.distributed.checkpoint writes that file last\n  check the path, or leave --format out"
        ) from error
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
            inner[last] = stream_made(name, tuple(entry.size), entry.properties.dtype, read)
        else:
            inner[last] = _load(path, infos[name, None])
    return found


def _read_tensor(path: Path, entry: TensorStorageMetadata, chunks: Sequence[tuple[Any, Any]]) -> torch.Tensor:
    """Returns a tensor of the chunks that its metadata lists, each with its place in a file."""
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
            part = FileSystemReader(path)._slice_file(file, info)
            return torch.load(part, map_location="cpu", weights_only=True)
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
    return CheckpointError(
        f"{path} is damaged: {reason}\n  every file that torch.distributed.checkpoint wrote is needed, whole\n"
        "  copy the folder again, or use another checkpoint"
    )
