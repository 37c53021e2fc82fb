"""Tensors as streams of bytes: read from a checkpoint window by window, written to files as they come.

``write_checkpoint`` writes a checkpoint as if other ranks had saved it: what ``reshard`` and ``import`` end in.

Memory: some windows of 8 MiB, whatever the size of a tensor or of the checkpoint.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import State
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.storage import LocalFiles, cannot_write, is_remote, storage_of, url_of
from paceline.checkpoint.tensors import Progress, Stream, file_chunks, host_bytes, ignore_progress
from paceline.checkpoint.write import SaveTarget, commit, discard, write_rank
from paceline.errors import CheckpointError
from paceline.shards import Region, whole_region

WINDOW_BYTES = 2**23
_SCATTERED = 2**18  # elements of a window where memory lies in another order, and each is looked up by itself


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


def stream_saved(checkpoint: Checkpoint, name: str, region: Region | None = None) -> Stream:
    """Returns a saved tensor, or a region of one, as a stream."""
    return Stream(
        name=name,
        region=whole_region(checkpoint.manifest.tensors[name].shape) if region is None else region,
        dtype=checkpoint.dtype(name),
        read=lambda: (host_bytes(window) for window in stream_region(checkpoint, name, region)),
    )


def stream_made(name: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Stream:
    """Returns a tensor that is made when it is read, as a stream."""

    def read() -> Iterator[memoryview]:
        flat = make().detach().to(dtype).contiguous().reshape(-1)
        step = max(WINDOW_BYTES // dtype.itemsize, 1)
        for first in range(0, flat.numel(), step):
            yield host_bytes(flat[first : first + step])

    return Stream(name=name, region=whole_region(shape), dtype=dtype, read=read)


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
    """Writes ``folder/step-<n>`` with the pieces of each rank; returns its path. ``own``: each rank's values, as JSON.

    Raises CheckpointError if it is there already and may not be replaced, or cannot be written.
    """
    storage = storage_of(folder)
    token = secrets.token_hex(4)
    targets = [
        SaveTarget(folder=folder, step=plain.step, rank=rank, world=len(ranks), token=token, storage=storage)
        for rank in range(len(ranks))
    ]
    first = targets[0]
    if storage.names(first.final) and not may_replace:
        raise CheckpointError(
            f"{url_of(first.final)} is there already\n  it would be replaced\n  name another folder, or add --force"
        )
    check_parent(folder)
    is_new = not is_remote(folder) and not folder.exists()
    try:
        for target, streams in zip(targets, ranks, strict=True):
            found = plain.found if target.rank == 0 else {}
            values = {"dict": []} if own is None else own[target.rank]
            write_rank(target, streams, replace(plain, own=values, found=found), progress)
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
        is_file = path.parent.exists()
        rule = "a file is where a folder is needed" if is_file else "it goes into a folder that is there"
        raise CheckpointError(
            f"{path} cannot be written: {path.parent} is no folder\n  {rule}\n"
            f"  make it first, or name another:  mkdir -p {shlex.quote(str(path.parent))}"
        )
