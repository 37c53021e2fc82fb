"""Reading: any part of any tensor, from whichever ranks' files have it.

A rank asks for the regions that it holds now. What they have in common with the pieces that were saved is read, byte
range by byte range, into the tensors themselves: nothing is gathered, and no rank reads what it does not need, but for
gaps of less than 64 KiB. Memory: one chunk, or a copy of 64 MiB where the tensors are on a device or of another dtype.

Small files that belong to a model are tensors of bytes, and so they are hashed, resharded and exported with the rest:

    files/tokenizer/...   what tokens stand for, as ``data/tokenizers.py`` writes it
    files/hf/...          config.json of a Hugging Face model, and what its folder has for tokens and images
    files/lora.json       adapters by the names of their layers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.find import verify_checkpoint
from paceline.checkpoint.formats import Header, check_found, read_header
from paceline.checkpoint.manifest import ITEM_BYTES, MODEL, HasShards, Manifest, SavedPiece, SavedTensor, damaged
from paceline.checkpoint.storage import FileStore, file_in, num_threads, storage_of
from paceline.checkpoint.tensors import DTYPES, decode, flat_view, host_bytes, read_runs
from paceline.errors import CheckpointError, MisfitError
from paceline.models.mlp import former_names
from paceline.shards import Region, Shard, common_runs, whole_region
from paceline.untrusted import parse_json_object, plain_name

_STAGE_BYTES = 2**26
FILES = "files/"
TOKENIZER, HUGGING_FACE, LORA = "tokenizer/", "hf/", "lora.json"


class Checkpoint:
    """A checkpoint that is read from. Cheap to make: it has read the manifest alone."""

    def __init__(self, path: Path, manifest: Manifest, storage: FileStore) -> None:
        self.path = path
        self.manifest = manifest
        self._storage = storage
        self._headers: dict[str, tuple[Path, Header]] = {}
        self._former: dict[str, str] = {}

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def values(self) -> dict[str, Any]:
        """What was the same on every rank."""
        return {name: decode(value) for name, value in self.manifest.values.items()}

    @cached_property
    def found(self) -> dict[str, Any]:
        """What single ranks knew, and all may need."""
        return decode_found(self.manifest)

    def own(self, rank: int) -> dict[str, Any]:
        """Returns the values of one of the ranks that saved it."""
        path = file_in(self.path, f"rank-{rank:05d}.json")
        try:
            found = decode(parse_json_object(self._storage.read(path))["values"])
        except (OSError, ValueError, KeyError) as error:
            raise damaged(f"{path} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise damaged(f"{path} cannot be read: its values are no dict")
        return found

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives what was saved of parameters under former names the names of today."""

        def today(path: str) -> str:
            return "/".join(names.get(part, part) for part in path.split("/"))

        saved = self.manifest
        self._former = {today(path): path for path in saved.tensors}
        tensors = {today(path): tensor for path, tensor in saved.tensors.items()}
        self.manifest = replace(saved, tensors=tensors, found={today(path): each for path, each in saved.found.items()})
        vars(self).pop("found", None)

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors whose names begin so, by what follows."""
        found = self.manifest.tensors
        return {name.removeprefix(prefix): found[name].shape for name in found if name.startswith(prefix)}

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._saved(name).dtype]

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Returns a region of a tensor, flat, or a whole one; zeros where nobody has saved anything."""
        saved = self._saved(name)
        wanted = whole_region(saved.shape) if region is None else region
        if region is None:
            for piece in saved.pieces:
                self._place(piece, name, saved.dtype)  # before there is memory for it: the files may be smaller
        out = torch.zeros(wanted.size, dtype=DTYPES[saved.dtype])
        self._read(name, saved, wanted, out)
        return out.view(saved.shape) if region is None else out

    @torch.no_grad()
    def fill(self, shard: Shard, name: str) -> None:
        """Fills a shard's tensor from a saved one. Raises CheckpointError for another shape, or missing elements."""
        saved, region = self._saved(name), shard.region
        if saved.shape != region.shape:
            raise MisfitError(f"size mismatch for {name}: {list(saved.shape)} is saved, {list(region.shape)} is here")
        flat, dtype = flat_view(shard.tensor, region), DTYPES[saved.dtype]
        is_view = flat.data_ptr() == shard.tensor.data_ptr()
        if is_view and flat.device.type == "cpu" and flat.dtype == dtype:
            self._fill_exactly(name, saved, region, flat)
            return
        step = max(_STAGE_BYTES // dtype.itemsize, 1) if is_view else max(region.size, 1)
        for first in range(0, region.size, step):
            last = min(first + step, region.size)
            stage = torch.empty(last - first, dtype=dtype)
            self._fill_exactly(name, saved, region.narrow(first, last), stage)
            flat[first:last].copy_(stage)
        if not is_view:
            held = shard.tensor.detach()
            order = region.order or tuple(range(held.ndim))
            held.permute(order).copy_(flat.view(held.permute(order).shape))

    def fill_all(self, shards: Sequence[tuple[Shard, str]]) -> None:
        """Fills shards, each from the saved tensor of a name, by several threads."""
        threads = min(num_threads(), len(shards))
        if threads <= 1:
            for shard, name in shards:
                self.fill(shard, name)
            return
        with ThreadPoolExecutor(threads) as pool:
            for filled in [pool.submit(self.fill, *each) for each in shards]:
                filled.result()

    def _fill_exactly(self, name: str, saved: SavedTensor, region: Region, out: torch.Tensor) -> None:
        count = self._read(name, saved, region, out)
        if count != region.size:
            raise CheckpointError(f"{self.path} has {count} of the {region.size} elements of {name} that are needed")

    def _read(self, name: str, saved: SavedTensor, region: Region, out: torch.Tensor) -> int:
        """Reads what there is of a region; returns how many elements that was."""
        if region.size == 0:
            return 0
        memory, itemsize, count = host_bytes(out), out.element_size(), 0
        for piece in saved.pieces:
            runs = common_runs(region, piece.region)
            length = int(runs.length.sum())
            if length == 0:
                continue
            path, start = self._place(piece, name, saved.dtype)
            try:
                read_runs(self._storage, path, start, runs, memory, itemsize)
            except (OSError, EOFError) as error:
                raise damaged(f"{path} cannot be read: {error}") from error
            count += length
        return count

    def _place(self, piece: SavedPiece, name: str, dtype: str) -> tuple[Path, int]:
        """Returns the file of a piece, and where its bytes begin. Raises CheckpointError if some are missing."""
        if piece.file not in self._headers:
            path = file_in(self.path, piece.file)
            self._headers[piece.file] = path, read_header(self._storage, path)
        path, header = self._headers[piece.file]
        place, wanted = (
            header.tensors.get(piece.name or self._former.get(name, name)),
            piece.region.size * ITEM_BYTES[dtype],
        )
        if place is None:
            raise damaged(f"{path} is damaged: it has no {name}")
        if (place.dtype, place.num_bytes) != (dtype, wanted):
            have = f"{place.num_bytes} bytes of {place.dtype}"
            raise damaged(f"{path} is damaged: {name} has {have}, not {wanted} of {dtype}")
        return path, place.begin

    def _saved(self, name: str) -> SavedTensor:
        saved = self.manifest.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return saved


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint. Raises CheckpointError when it is none, cannot be read, or lacks a part of a tensor."""
    return Checkpoint(path, verify_checkpoint(path, "none"), storage_of(path))


def decode_found(manifest: Manifest) -> dict[str, Any]:
    """Returns what single ranks knew. Raises CheckpointError for what is no state of an optimizer."""
    return check_found({name: decode(value) for name, value in manifest.found.items()})


def fill_model(checkpoint: Checkpoint, holder: HasShards) -> None:
    """Fills an engine of any strategy. Raises MisfitError, before anything is changed, for other names or shapes."""
    shards, known = list(holder.shards()), holder.state_names()
    if former := former_names(checkpoint.shapes(MODEL), known):
        checkpoint.rename(former)
    saved = checkpoint.shapes(MODEL)
    problems = [f"unexpected {name}" for name in saved if name not in known]
    for shard in shards:
        shape, here = saved.get(shard.name), shard.region.shape
        if shape is None:
            problems.append(f"missing {shard.name}")
        elif shape != here:
            problems.append(f"size mismatch for {shard.name}: {list(shape)} is saved, {list(here)} is here")
    if problems:
        raise MisfitError("; ".join(problems))
    checkpoint.fill_all([(shard, MODEL + shard.name) for shard in shards])
    holder.mark_loaded()


def file_shards(files: Mapping[str, bytes], rank: int) -> list[Shard]:
    """Returns files as what is saved, which rank 0 writes."""
    copy = None if rank else 0
    tensors = {name: torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()) for name, content in files.items()}
    wholes = {name: whole_region(tuple(each.shape)) for name, each in tensors.items()}
    return [Shard(name=FILES + name, region=wholes[name], tensor=each, copy=copy) for name, each in tensors.items()]


def read_files(checkpoint: Checkpoint, below: str = "") -> dict[str, bytes]:
    """Returns the files whose names begin with ``below``, by what follows."""
    prefix = FILES + below
    names = [name for name in checkpoint.manifest.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): bytes(host_bytes(checkpoint.read(name))) for name in names}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes files into a folder that is there. Raises ValueError for a name that leads elsewhere."""
    for name, content in files.items():
        (folder / plain_name(name)).write_bytes(content)
