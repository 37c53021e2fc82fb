"""Tensors as streams of bytes: read from a checkpoint window by window, written to files as they come.

``write_checkpoint`` writes a checkpoint as if other ranks had saved it: what ``reshard`` and ``import`` end in. Loading
needs no ``reshard``: any ranks read any checkpoint. Where the model is known, a rank writes what its engine would: it
is asked on a model without values (``rehearse/dryrun/parts.py``). A checkpoint that does not say which model it is of
can be cut among data ranks:

    fsdp, zero    the tensors of a block lie one after another, and every rank has an equal piece of them
    ddp           all ranks hold everything, and share the writing: the n-th part of each tensor

Values that ranks had of their own (random states) are kept where the number of ranks stays.

``write_torch`` writes what ``torch.load(path, weights_only=True)`` reads: a zip archive without compression, in
which ``data.pkl`` has the structure, and every tensor of it is a reference to the bytes under ``data/<n>``. torch
itself needs all tensors in memory to write it.

Memory: some windows of 8 MiB, whatever the size of a tensor or of the checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import secrets
import shlex
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import ITEM_BYTES, OPTIMIZER, SavedTensor, State
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.storage import LocalFiles, cannot_write, is_remote, storage_of, url_of
from paceline.checkpoint.tensors import Progress, Stream, encode, file_chunks, host_bytes, ignore_progress
from paceline.checkpoint.write import SaveTarget, commit, discard, own_interval, write_rank
from paceline.errors import CheckpointError, UsageError
from paceline.plan.layout import Layout
from paceline.shards import Region, flat_layout, row_major, whole_region

Cut = Sequence[Mapping[str, Region]]  # by rank: what it writes of the model's tensors
Parts = Iterable[bytes | memoryview]
Pieces = list[tuple[str, Region]]  # what a rank writes
Tensors = Mapping[str, SavedTensor]
WINDOW_BYTES = 2**23
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|stages)\.(\d+)\.")
_ALIGN_BYTES = 64  # as torch does: a file that is mapped has its tensors where processors want them
_HEADER_BYTES = 30  # of an entry, before its name and what is added to fill up
_STORAGES: Mapping[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()  # such as "FloatStorage"
_SCATTERED = 2**18  # elements of a window where memory lies in another order, and each is looked up by itself


def stream_region(checkpoint: Checkpoint, name: str, region: Region, step: int) -> Iterator[torch.Tensor]:
    """Yields a region of a tensor as flat windows of ``step`` elements, one of which is in memory at a time."""
    for first in range(0, region.size, step):
        yield checkpoint.read(name, region.narrow(first, min(first + step, region.size)))


def window_elements(checkpoint: Checkpoint, name: str, region: Region) -> int:
    if any(piece.region.order != region.order for piece in checkpoint.manifest.tensors[name].pieces):
        return _SCATTERED
    return max(WINDOW_BYTES // checkpoint.dtype(name).itemsize, 1)


def stream_saved(checkpoint: Checkpoint, name: str, region: Region | None = None) -> Stream:
    """Returns a region of a tensor, or all of it, row by row, as a stream."""
    wanted = region or whole_region(checkpoint.manifest.tensors[name].shape)

    def read() -> Iterator[memoryview]:
        return map(host_bytes, stream_region(checkpoint, name, wanted, window_elements(checkpoint, name, wanted)))

    def narrow(first: int, last: int) -> Stream:
        return stream_saved(checkpoint, name, wanted.narrow(first, last))

    return Stream(name=name, region=wanted, dtype=checkpoint.dtype(name), read=read, narrow=narrow)


def write_safetensors(path: Path, streams: Sequence[Stream], metadata: Mapping[str, str], progress: Progress) -> None:
    """Writes streams as one safetensors file. Wide dtypes come first, so that all lie where processors want them."""
    ordered = sorted(streams, key=lambda stream: -stream.dtype.itemsize)
    LocalFiles().write(path, file_chunks(ordered, metadata, progress))


def write_checkpoint(
    folder: Path,
    ranks: Sequence[Sequence[Stream]],
    plain: State,
    *,
    own: Sequence[Any] | None = None,
    progress: Progress = ignore_progress,
    may_replace: bool = False,
) -> Path:
    """Writes ``folder/step-<n>`` with each rank's pieces and ``own`` values. Raises CheckpointError if it cannot."""
    storage = storage_of(folder)
    token = secrets.token_hex(4)
    first = SaveTarget(folder=folder, step=plain.step, rank=0, world=len(ranks), token=token, storage=storage)
    if storage.names(first.final) and not may_replace:
        what = f"{url_of(first.final)} is there already"
        raise CheckpointError(f"{what}\n  it would be replaced\n  name another folder, or add --force")
    check_parent(folder)
    is_new = not is_remote(folder) and not folder.exists()
    try:
        for rank, streams in enumerate(ranks):
            found = plain.found if rank == 0 else {}
            values = {"dict": []} if own is None else own[rank]
            write_rank(replace(first, rank=rank), streams, replace(plain, own=values, found=found), progress)
        commit(first, plain)
    except BaseException as error:
        discard(first)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # what was made for it goes, too
        if isinstance(error, OSError):
            raise cannot_write(first.final, error) from error
        raise
    return first.final


def check_parent(path: Path) -> None:
    """Raises CheckpointError where there is no folder for what is to be written: a typo must not make one."""
    if not is_remote(path) and not path.absolute().parent.is_dir():
        what, fix = f"{path} cannot be written: {path.parent} is no folder", shlex.quote(str(path.parent))
        rule = "a file is where a folder is needed" if path.parent.exists() else "it goes into a folder that is there"
        raise CheckpointError(f"{what}\n  {rule}\n  make it first, or name another:  mkdir -p {fix}")


def write_torch(path: Path, content: Mapping[str, Any], progress: Progress = ignore_progress) -> None:
    """Writes nested dicts and lists of plain values, tensors and streams. Raises UsageError for a dtype it has not."""
    structure = io.BytesIO()
    pickler = _Pickler(structure)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", [structure.getvalue()])
        _add(archive, "byteorder", [b"little"])
        for number, stream in enumerate(pickler.streams):
            _add(archive, f"data/{number}", stream.read(), progress, stream.num_bytes)
        _add(archive, "version", [b"3\n"])


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of a tensor: pickled as a reference to a file of the archive."""

    stream: Stream


class _Pickler(pickle.Pickler):
    """Pickles streams as tensors, and numbers them in their order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.streams: list[Stream] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = Stream.made("a value", value.shape, value.dtype, partial(torch.Tensor.clone, value))
        if not isinstance(value, Stream):
            return NotImplemented
        if value.dtype not in _STORAGES:
            raise UsageError(f"{value.name} is of {value.dtype}, which torch files have not\n  export as safetensors")
        hooks: OrderedDict[Any, Any] = OrderedDict()
        return torch._utils._rebuild_tensor_v2, (_Storage(value), 0, value.shape, row_major(value.shape), False, hooks)

    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, _Storage):
            return None
        self.streams.append(value.stream)
        kind, elements = getattr(torch, _STORAGES[value.stream.dtype]), math.prod(value.stream.shape)
        return "storage", kind, str(len(self.streams) - 1), "cpu", elements


def _add(
    archive: zipfile.ZipFile, name: str, parts: Parts, progress: Progress = ignore_progress, num_bytes: int = 0
) -> None:
    """Adds a file to the archive, whose bytes begin at a multiple of 64."""
    info = zipfile.ZipInfo(f"archive/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    is_large = num_bytes >= zipfile.ZIP64_LIMIT
    start = archive.fp.tell() + _HEADER_BYTES + len(info.filename.encode()) + (20 if is_large else 0)  # type: ignore[union-attr]
    fill = -(start + 4) % _ALIGN_BYTES
    info.extra = b"FB" + fill.to_bytes(2, "little") + b"Z" * fill
    with archive.open(info, "w", force_zip64=is_large) as file:
        for part in parts:
            file.write(part)
            progress(len(part))


def reshard(
    checkpoint: Checkpoint,
    folder: Path,
    layout: Layout,
    cut: Cut | None = None,
    *,
    progress: Progress = ignore_progress,
    may_replace: bool = False,
) -> Path:
    """Writes a checkpoint into ``folder`` as a layout's ranks would; ``cut``: what their engines write, if known."""
    manifest = checkpoint.manifest
    regions = cut_regions(manifest.tensors, layout, cut)
    ranks = [[stream_saved(checkpoint, name, region) for name, region in held] for held in regions]
    own = None
    if manifest.world == layout.ranks:
        own = [encode(checkpoint.own(rank), f"what rank {rank} had of its own") for rank in range(layout.ranks)]
    mesh = {"pipeline": layout.pipeline, "tensor": layout.tensor}
    about, values = {**manifest.about, "strategy": layout.strategy, "mesh": mesh}, manifest.values
    plain = State(step=manifest.step, position=manifest.position, values=values, found=manifest.found, about=about)
    return write_checkpoint(folder, ranks, plain, own=own, progress=progress, may_replace=may_replace)


def cut_regions(tensors: Tensors, layout: Layout, cut: Cut | None = None) -> list[Pieces]:
    """Returns for each rank the names and regions that it writes; together they are every tensor once."""
    if cut is not None:
        return [_as_in_training(held, tensors, rank, len(cut)) for rank, held in enumerate(cut)]
    if layout.is_split:
        raise UsageError(
            f"pipeline {layout.pipeline} x tensor {layout.tensor} for a checkpoint that does not say which model it "
            "is of\n  only the model knows its layers; checkpoints of paceline train name it\n"
            "  leave --pipeline and --tensor out: a run that resumes reads its parts from any cut"
        )
    share = _shared if layout.strategy == "ddp" else _flat_pieces
    return [share(tensors, rank, layout.ranks) for rank in range(layout.ranks)]


def _as_in_training(held: Mapping[str, Region], tensors: Tensors, rank: int, ranks: int) -> Pieces:
    """Returns what a rank writes, the optimizer's state of a parameter like the parameter itself."""
    found = []
    for name, saved in tensors.items():
        parameter = _parameter(name)
        if f"model/{parameter}" in tensors and tensors[f"model/{parameter}"].shape == saved.shape:
            if parameter in held:
                found.append((name, held[parameter]))
        elif zlib.crc32(name.encode()) % ranks == rank:  # numbers beside the parameters: one rank has each
            found.append((name, _whole(saved)))
    return found


def _whole(saved: SavedTensor) -> Region:
    return whole_region(saved.shape, saved.pieces[0].region.order if saved.pieces else None)


def _shared(tensors: Tensors, rank: int, ranks: int) -> Pieces:
    """Returns a rank's part of what all ranks hold, in the way in which they share the writing."""
    found = []
    for name, saved in tensors.items():
        interval = own_interval(name, _whole(saved), ITEM_BYTES[saved.dtype], rank, ranks)
        if interval is not None:
            found.append((name, _whole(saved).narrow(*interval)))
    return found


def _flat_pieces(tensors: Tensors, rank: int, ranks: int) -> Pieces:
    """Returns a rank's slice of each unit: its tensors one after another, cut into equal pieces."""
    units: dict[tuple[object, ...], list[str]] = {}
    for name, saved in tensors.items():
        kind = name.rpartition("/")[2] if name.startswith(OPTIMIZER) else name.partition("/")[0]
        layer = _LAYER.search(_parameter(name))
        units.setdefault((layer and layer[1], kind, saved.dtype), []).append(name)
    found = []
    for names in units.values():
        wholes = [_whole(tensors[name]) for name in names]
        layout = flat_layout([(whole.size,) for whole in wholes], num_shards=ranks)
        begin, end = layout.shard_range(rank, ranks)
        for name, whole, slot in zip(names, wholes, layout.slots, strict=True):
            first = min(max(begin - slot.offset, 0), slot.numel)
            last = min(max(end - slot.offset, 0), slot.numel)
            if first < last or (slot.numel == 0 and rank == 0 and 0 in whole.shape):
                found.append((name, whole.narrow(first, last)))
    return found


def _parameter(name: str) -> str:
    """Returns the parameter's name in that of a tensor of the model, or of the optimizer's state of it."""
    inner = name.partition("/")[2]
    return inner.rpartition("/")[0] if name.startswith(OPTIMIZER) else inner
