"""A trainer that runs to a step and may save on its way, and its state on disk: what tests of all kinds go on from."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.read import Checkpoint, open_checkpoint
from paceline.config import CheckpointConfig
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import Trainer


def save_now(trainer: Trainer, folder: Path) -> Checkpoint:
    """Saves a trainer after its last step, and opens what was saved. All ranks call it."""
    Saver(folder, CheckpointConfig(keep=99, asynchronous=False)).save(trainer, "asked")
    return open_checkpoint(folder / f"step-{trainer.step:08d}")


def losses_until(trainer: Trainer, end: int, saver: Saver | None = None) -> list[float]:
    """Trains until step ``end``; returns the losses. A saver is called after each step."""
    found = []
    for result in trainer.steps():
        found.append(result.loss)
        if saver is not None:
            saver(trainer, result)
        if result.step == end:
            break
    return found
