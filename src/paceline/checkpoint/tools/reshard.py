"""Cutting a checkpoint anew, as another world would have saved it.

Loading needs none of this: any ranks read any checkpoint. It is for copying to machines where each rank sees its own
disk, and for evening out files. Ranks stand as in training, data outermost, then stages, then tensor ranks:

    fsdp, zero    the tensors of a block lie one after another, and every data rank has an equal piece of them
    ddp           all data ranks hold everything, and share the writing: the n-th part of each tensor
    --tensor n    matrices are cut along one dim before, in the way of the package's GPT
    --pipeline n  layers are dealt out to stages before, in order

Values that ranks had of their own (random states) are kept where the number of ranks stays; otherwise a run draws new
ones when it goes on, as after any change of the world.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.checkpoint.manifest import OPTIMIZER, SavedTensor, State
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tensors import Progress, dtype_of, encode, host_bytes, ignore_progress
from paceline.checkpoint.tools.stream import stream_region, write_checkpoint
from paceline.checkpoint.write import StreamedPiece, own_interval
from paceline.errors import UsageError
from paceline.mesh import Mesh
from paceline.shards import Region, flat_layout, whole_region

Strategy = Literal["ddp", "zero1", "zero2", "fsdp", "hybrid"]

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|stages)\.(\d+)\.")
_ROWS = ("output", "down", "o_proj", "down_proj", "c_proj", "fc2")  # cut along their second dim


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who a checkpoint is cut for."""

    ranks: int
    strategy: Strategy = "fsdp"
    pipeline: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.ranks % (self.pipeline * self.tensor):
            raise UsageError(
                f"{self.ranks} ranks are not a multiple of pipeline {self.pipeline} x tensor {self.tensor}\n"
                "  each data rank has all stages and tensor ranks\n"
                f"  try --ranks {self.pipeline * self.tensor * max(self.ranks // (self.pipeline * self.tensor), 1)}"
            )

    @property
    def mesh(self) -> Mesh:
        """The ranks as a grid."""
        return Mesh.of(data=self.ranks // (self.pipeline * self.tensor), pipeline=self.pipeline, tensor=self.tensor)


def reshard(
    checkpoint: Checkpoint,
    folder: Path,
    world: World,
    *,
    progress: Progress = ignore_progress,
    may_replace: bool = False,
) -> Path:
    """Writes a checkpoint into ``folder`` as the ranks of another world would have; returns its path."""
    manifest = checkpoint.manifest
    regions = cut_regions(manifest.tensors, world)
    ranks = [[_piece(checkpoint, name, region) for name, region in held] for held in regions]
    own = None
    if manifest.world == world.ranks:
        own = [encode(checkpoint.own(rank), f"what rank {rank} had of its own") for rank in range(world.ranks)]
    about = {**manifest.about, "strategy": world.strategy, "mesh": {"pipeline": world.pipeline, "tensor": world.tensor}}
    plain = State(
        step=manifest.step, position=manifest.position, values=manifest.values, found=manifest.found, about=about
    )
    return write_checkpoint(folder, ranks, plain, own=own, progress=progress, may_replace=may_replace)


def cut_regions(tensors: Mapping[str, SavedTensor], world: World) -> list[list[tuple[str, Region]]]:
    """Returns for each rank the names and regions that it writes; together they are every tensor once."""
    mesh, found = world.mesh, []
    data = mesh.axis_size("data")
    num_layers = 1 + max((layer for name in tensors if (layer := _layer(name)) is not None), default=-1)
    if world.pipeline > max(num_layers, 1):
        raise UsageError(
            f"--pipeline {world.pipeline} for a model with {num_layers} numbered layers\n"
            "  every stage has at least one\n  give a smaller number, or leave it out"
        )
    for rank in range(world.ranks):
        place = mesh.coordinates(rank)
        held = {
            name: region
            for name in tensors
            if _stage(name, num_layers, world.pipeline) == place["pipeline"]
            and (region := _tensor_part(name, tensors, place["tensor"], world.tensor)) is not None
        }
        if world.strategy == "ddp":
            found.append(_shared(held, tensors, place["data"], data))
        else:
            found.append(_flat_pieces(held, tensors, place["data"], data))
    return found


def _tensor_part(name: str, tensors: Mapping[str, SavedTensor], rank: int, size: int) -> Region | None:
    """Returns what a tensor rank holds of a tensor and writes; None for what another writes."""
    shape = tensors[name].shape
    order = tensors[name].pieces[0].region.order if tensors[name].pieces else None
    whole = whole_region(shape, order)
    dim = _cut_dim(name, shape) if size > 1 else None
    if dim is None or shape[dim] < size:
        return whole if zlib.crc32(_parameter(name).encode()) % size == rank else None
    first, last = rank * shape[dim] // size, (rank + 1) * shape[dim] // size
    region = replace(whole, dim=dim, spans=((first, last),))
    return replace(region, end=whole.size // shape[dim] * (last - first))


def _cut_dim(name: str, shape: Sequence[int]) -> int | None:
    if len(shape) != 2:
        return None
    return 1 if any(word in _ROWS for word in _parameter(name).split(".")) else 0


def _shared(
    held: Mapping[str, Region], tensors: Mapping[str, SavedTensor], rank: int, ranks: int
) -> list[tuple[str, Region]]:
    """Returns a rank's part of what all data ranks hold, in the way in which they share the writing."""
    found = []
    for name, region in held.items():
        interval = own_interval(name, region, dtype_of(tensors[name].dtype).itemsize, rank, ranks)
        if interval is not None:
            found.append((name, region.narrow(*interval)))
    return found


def _flat_pieces(
    held: Mapping[str, Region], tensors: Mapping[str, SavedTensor], rank: int, ranks: int
) -> list[tuple[str, Region]]:
    """Returns a rank's slice of each unit: its tensors one after another, cut into equal pieces."""
    units: dict[tuple[object, ...], list[str]] = {}
    for name in held:
        kind = name.rpartition("/")[2] if name.startswith(OPTIMIZER) else name.partition("/")[0]
        units.setdefault((_layer(name), kind, tensors[name].dtype), []).append(name)
    found = []
    for names in units.values():
        layout = flat_layout([(held[name].size,) for name in names], num_shards=ranks)
        begin, end = layout.shard_range(rank, ranks)
        for name, slot in zip(names, layout.slots, strict=True):
            first = min(max(begin - slot.offset, 0), slot.numel)
            last = min(max(end - slot.offset, 0), slot.numel)
            if first < last or (slot.numel == 0 and rank == 0 and 0 in held[name].shape):
                found.append((name, held[name].narrow(first, last)))
    return found


def _layer(name: str) -> int | None:
    found = _LAYER.search(_parameter(name))
    return None if found is None else int(found[1])


def _stage(name: str, num_layers: int, stages: int) -> int:
    layer = _layer(name)
    if layer is not None:
        return layer * stages // num_layers
    return 0 if "embed" in _parameter(name) else stages - 1


def _parameter(name: str) -> str:
    """Returns the parameter's name in that of a tensor of the model, or of the optimizer's state of it."""
    inner = name.partition("/")[2]
    return inner.rpartition("/")[0] if name.startswith(OPTIMIZER) else inner


def _piece(checkpoint: Checkpoint, name: str, region: Region) -> StreamedPiece:
    return StreamedPiece(
        name=name,
        region=region,
        dtype=checkpoint.dtype(name),
        read=lambda: (host_bytes(window) for window in stream_region(checkpoint, name, region)),
    )
