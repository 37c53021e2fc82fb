"""Checkpoints for plain loops: an engine, its optimizer, and what else a loop wants to remember.

checkpoint.save("checkpoints", engine, optimizer, step=100, extra={"epoch": 3})      # all ranks
found = checkpoint.load("checkpoints", engine, optimizer)                           # the newest whole one, any ranks
found.step, found.extra
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.checkpoint.find import Depth, find_checkpoint
from paceline.checkpoint.manifest import MODEL, HasShards, State, prefixed
from paceline.checkpoint.optimizer import load_optimizer, optimizer_shards
from paceline.checkpoint.read import fill_model, open_checkpoint
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.writer import CheckpointWriter
from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.errors import CheckpointError


class Holder(HasShards, Protocol):
    """An engine: shards, and the ranks that hold them together."""

    @property
    def world(self) -> Communicator:
        """All ranks that train together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a loop goes on from."""

    path: Path
    step: int
    extra: Any


def save(
    folder: str | Path,
    engine: Holder,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Saves into ``folder/step-<step>``, each rank what it holds; of older ones the newest ``keep`` are left.

    Called by all ranks. ``extra`` is what else is to be remembered: plain values, those of rank 0. Raises
    CheckpointError on all ranks if one cannot write; older checkpoints are intact then.
    """
    writer = CheckpointWriter(Path(folder), engine.world, Retention(last=keep))
    shards = list(engine.shards())
    tensors, found = ([], {}) if optimizer is None else optimizer_shards(optimizer, shards)
    values = {"extra": extra}
    state = State(step=step, position=0, shards=[*prefixed(MODEL, shards), *tensors], values=values, found=found)
    return writer.save(state)


def load(
    path: str | Path, engine: Holder, optimizer: torch.optim.Optimizer | None = None, *, verify: Depth = "full"
) -> Loaded:
    """Loads a checkpoint, or the newest whole one of a folder, into an engine of any strategy and number of ranks.

    Called by all ranks, which read what rank 0 chooses. Raises CheckpointError on all of them if one cannot.
    """
    comm, chosen, problem, extra, step = engine.world, "", "", None, 0
    if comm.rank == 0:
        try:
            chosen = str(find_checkpoint(str(path), Path(path), verify))
        except CheckpointError as error:
            problem = str(error)
    chosen, problem = broadcast_object(comm, (chosen, problem))
    if problem:
        raise CheckpointError(problem)
    try:
        checkpoint = open_checkpoint(Path(chosen))
        fill_model(checkpoint, engine)
        if optimizer is not None:
            load_optimizer(checkpoint, optimizer, list(engine.shards()))
        extra, step = checkpoint.values.get("extra"), checkpoint.step
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        problem = f"{chosen} does not fit this model or optimizer\n  {error}"
    for rank, text in enumerate(gather_objects(comm, problem)):
        if text:
            raise CheckpointError(f"rank {rank}: {text}")
    return Loaded(path=Path(chosen), step=step, extra=extra)
