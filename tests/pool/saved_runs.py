"""A trainer's state on disk, as it stands: what tests of all kinds go on from."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.read import Checkpoint, open_checkpoint
from paceline.config import CheckpointConfig
from paceline.train.survive.saving import Saver
from paceline.train.trainer import Trainer


def save_now(trainer: Trainer, folder: Path) -> Checkpoint:
    """Saves a trainer after its last step, and opens what was saved. All ranks call it."""
    Saver(folder, CheckpointConfig(keep=99, asynchronous=False)).save(trainer, "asked")
    return open_checkpoint(folder / f"step-{trainer.step:08d}")
