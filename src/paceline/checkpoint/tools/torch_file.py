"""A torch state dict in one file, written as a stream: what ``torch.load(path, weights_only=True)`` reads.

The file is a zip archive without compression. ``data.pkl`` has the structure, in which every tensor is a reference to
the bytes that follow under ``data/<n>``. torch itself needs all tensors in memory to write it; here it is one window.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.tensors import Progress, Stream, ignore_progress
from paceline.checkpoint.tools.stream import stream_made
from paceline.errors import UsageError
from paceline.shards import row_major

_ALIGN_BYTES = 64  # as torch does: a file that is mapped has its tensors where processors want them
_HEADER_BYTES = 30  # of an entry, before its name and what is added to fill up
_NAME = "archive"
_STORAGES: Mapping[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()  # such as "FloatStorage"


def write_torch_file(path: Path, content: Mapping[str, Any], progress: Progress = ignore_progress) -> None:
    """Writes nested dicts and lists of plain values, tensors and streams. Raises UsageError for a dtype it has not."""
    structure = io.BytesIO()
    pickler = _Pickler(structure, protocol=2)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", [structure.getvalue()])
        _add(archive, "byteorder", [b"little"])
        for number, stream in enumerate(pickler.streams):
            _add(archive, f"data/{number}", stream.read(), progress, num_bytes=stream.num_bytes)
        _add(archive, "version", [b"3\n"])


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of a tensor: pickled as a reference to a file of the archive."""

    stream: Stream


class _Pickler(pickle.Pickler):
    """Pickles streams as tensors, and numbers them in their order."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.streams: list[Stream] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = stream_made("a value", value.shape, value.dtype, partial(torch.Tensor.clone, value))
        if not isinstance(value, Stream):
            return NotImplemented
        if value.dtype not in _STORAGES:
            raise UsageError(
                f"{value.name} is of {value.dtype}, which a torch file of this kind has not\n  export it as safetensors"
            )
        shape = value.shape
        arguments: tuple[Any, ...] = (_Storage(value), 0, shape, row_major(shape), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, _Storage):
            return None
        self.streams.append(value.stream)
        kind, elements = getattr(torch, _STORAGES[value.stream.dtype]), math.prod(value.stream.shape)
        return "storage", kind, str(len(self.streams) - 1), "cpu", elements


def _add(
    archive: zipfile.ZipFile,
    name: str,
    parts: Iterable[bytes | memoryview],
    progress: Progress = ignore_progress,
    *,
    num_bytes: int | None = None,
) -> None:
    """Adds a file to the archive, whose bytes begin at a multiple of 64."""
    info = zipfile.ZipInfo(f"{_NAME}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    is_large = num_bytes is not None and num_bytes >= zipfile.ZIP64_LIMIT
    start = archive.fp.tell() + _HEADER_BYTES + len(info.filename.encode()) + (20 if is_large else 0)  # type: ignore[union-attr]
    fill = -(start + 4) % _ALIGN_BYTES
    info.extra = b"FB" + fill.to_bytes(2, "little") + b"Z" * fill
    with archive.open(info, "w", force_zip64=is_large) as file:
        for part in parts:
            file.write(part)
            progress(len(part))
