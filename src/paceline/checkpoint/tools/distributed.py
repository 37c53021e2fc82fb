"""torch's distributed checkpoints (DCP): written so that ``torch.distributed.checkpoint.load`` reads them, and read.

    {"model": {name: tensor}, "optim": {"state": {name: {...}}, "param_groups": [...]}}

torch plans with the shapes, and asks for each tensor when it is its turn; each is a file of its own, since torch keeps
what it has written to a file until that is done. Memory: the largest tensor, or 64 MiB.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.checkpoint.manifest import MALFORMED
from paceline.checkpoint.storage import cannot_read
from paceline.checkpoint.tensors import Progress, Stream, ignore_progress
from paceline.checkpoint.tools.dcp_metadata import FILE, read_metadata
from paceline.checkpoint.tools.stream import stream_made
from paceline.errors import CheckpointError, UsageError

_TOGETHER_BYTES = 2**24


def write_distributed(path: Path, content: Mapping[str, Any], progress: Progress = ignore_progress) -> None:
    """Writes nested dicts of streams, tensors and plain values as a distributed checkpoint."""
    streams: dict[int, Stream] = {}
    shapes = _shapes(content, streams)
    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=1, sync_files=True)
    with _without_warning():
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
    places, entries = metadata.planner_data or {}, metadata.state_dict_metadata
    shapes = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    reader = _CheckedReader(path, metadata)
    values = reader.take({name: None for name in entries if name not in shapes})
    tensors = _Tensors(reader, shapes)
    found: dict[Any, Any] = {}
    for name in entries:
        *outer, last = places.get(name, (name,))
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise _damaged(path / FILE, f"{name} lies inside of a value")
        inner[last] = tensors.stream(name) if name in shapes else values[name]
    return found


class _CheckedReader(FileSystemReader):
    """Reads the files of a folder by metadata that was read and checked before: torch would unpickle anything."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._folder = path
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        return self._metadata

    def take(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if not wanted:
            return wanted
        with _without_warning():
            try:
                load(wanted, storage_reader=self, planner=_PlainValues(), no_dist=True)
            except CheckpointException as error:  # no Exception: nothing further out would catch it
                cause: BaseException = next(iter(error.failures.values()))[0]
                if isinstance(cause, FileNotFoundError):
                    raise _damaged(self._folder, f"{Path(str(cause.filename)).name} is missing") from error
                if isinstance(cause, OSError):
                    raise cannot_read(self._folder, cause) from error
                raise _damaged(self._folder, cause) from error
        return wanted


class _PlainValues(DefaultLoadPlanner):
    """Reads values as torch reads weights: plain ones, and never code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class _Tensors:
    """Reads tensors in the order in which they are asked for, several small ones at a time: each time has its price."""

    def __init__(self, reader: _CheckedReader, shapes: Mapping[str, TensorStorageMetadata]) -> None:
        self._reader = reader
        self._shapes = shapes
        self._read: dict[str, torch.Tensor] = {}

    def stream(self, name: str) -> Stream:
        entry = self._shapes[name]
        return stream_made(name, tuple(entry.size), entry.properties.dtype, partial(self._take, name))

    def _take(self, name: str) -> torch.Tensor:
        if name not in self._read:
            wanted: dict[str, Any] = {}
            num_bytes = 0
            for each, entry in itertools.dropwhile(lambda item: item[0] != name, self._shapes.items()):
                num_bytes += entry.size.numel() * entry.properties.dtype.itemsize
                if wanted and num_bytes > _TOGETHER_BYTES:
                    break
                wanted[each] = torch.empty(entry.size, dtype=entry.properties.dtype)
            self._read = self._reader.take(wanted)
        return self._read.pop(name)


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


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Silences torch's warning that there is one process: that is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
