"""Cutting a checkpoint anew, as another world would have saved it.

Loading needs none of this: any ranks read any checkpoint. What each rank writes is what its engine would write, where
the model is known: the engine of every rank is asked, on a model without values (``rehearse/dryrun/parts.py``). A
checkpoint that does not say which model it is of can be cut among data ranks:

    fsdp, zero    the tensors of a block lie one after another, and every rank has an equal piece of them
    ddp           all ranks hold everything, and share the writing: the n-th part of each tensor

Values that ranks had of their own (random states) are kept where the number of ranks stays; otherwise a run draws new
ones when it goes on, as after any change of the world.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.checkpoint.manifest import OPTIMIZER, SavedTensor, State
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tensors import Progress, dtype_of, encode, ignore_progress
from paceline.checkpoint.tools.stream import stream_saved, write_checkpoint
from paceline.checkpoint.write import own_interval
from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline.shards import Region, flat_layout, whole_region

Cut = Sequence[Mapping[str, Region]]  # by rank: what it writes of the model's tensors

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|stages)\.(\d+)\.")


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


def cut_regions(
    tensors: Mapping[str, SavedTensor], layout: Layout, cut: Cut | None = None
) -> list[list[tuple[str, Region]]]:
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


def _as_in_training(
    held: Mapping[str, Region], tensors: Mapping[str, SavedTensor], rank: int, ranks: int
) -> list[tuple[str, Region]]:
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


def _shared(tensors: Mapping[str, SavedTensor], rank: int, ranks: int) -> list[tuple[str, Region]]:
    """Returns a rank's part of what all ranks hold, in the way in which they share the writing."""
    found = []
    for name, saved in tensors.items():
        interval = own_interval(name, _whole(saved), dtype_of(saved.dtype).itemsize, rank, ranks)
        if interval is not None:
            found.append((name, _whole(saved).narrow(*interval)))
    return found


def _flat_pieces(tensors: Mapping[str, SavedTensor], rank: int, ranks: int) -> list[tuple[str, Region]]:
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
