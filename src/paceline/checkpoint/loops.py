"""Checkpoints for plain loops: an engine, its optimizer, and what else a loop wants to remember.

checkpoint.save("checkpoints", engine, optimizer, step=100, extra={"epoch": 3})      # all ranks
found = checkpoint.load("checkpoints", engine, optimizer)                           # the newest whole one, any ranks
found.step, found.extra
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.find import Depth, PassedOver, find_checkpoint
from paceline.checkpoint.manifest import MODEL, HasShards, State, prefixed
from paceline.checkpoint.optimizer import load_optimizer, optimizer_shards
from paceline.checkpoint.read import fill_model, open_checkpoint
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.writer import CheckpointWriter, raised_on_all
from paceline.comm.objects import ask_first_rank
from paceline.health.ledger_view import CHECKPOINT


def warn_of(passed: PassedOver) -> None:
    """Warns of a newer checkpoint that was not taken, and says why."""
    warnings.warn(str(passed), stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a loop goes on from."""

    path: Path
    step: int
    extra: Any


def save(
    folder: str | Path,
    engine: HasShards,
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
    _enter(engine)
    writer = CheckpointWriter(Path(folder), engine.world, Retention(last=keep))
    shards = list(engine.shards())
    tensors, found = ([], {}) if optimizer is None else optimizer_shards(optimizer, shards)
    values = {"extra": extra}
    state = State(step=step, position=0, shards=[*prefixed(MODEL, shards), *tensors], values=values, found=found)
    return writer.save(state)


def load(
    path: str | Path, engine: HasShards, optimizer: torch.optim.Optimizer | None = None, *, verify: Depth = "full"
) -> Loaded:
    """Loads a checkpoint, or the newest whole one of a folder, into an engine of any strategy and number of ranks.

    Called by all ranks, which read what rank 0 chooses. Newer ones that it passes over are warned of, with the reason.
    Raises CheckpointError on all of them if one cannot.
    """
    _enter(engine)
    chosen = ask_first_rank(engine.world, lambda: find_checkpoint(str(path), Path(path), verify, warn_of))
    with raised_on_all(engine.world, f"{chosen} does not fit this model or optimizer\n  "):
        checkpoint = open_checkpoint(chosen)
        fill_model(checkpoint, engine)
        if optimizer is not None:
            load_optimizer(checkpoint, optimizer, list(engine.shards()))
        return Loaded(path=chosen, step=checkpoint.step, extra=checkpoint.values.get("extra"))


def _enter(engine: HasShards) -> None:
    """Tells the ledger that the rank saves or loads, until the next pass begins."""
    if engine.world.ledger is not None:
        engine.world.ledger.enter(CHECKPOINT)
