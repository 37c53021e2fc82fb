"""A checkpoint that cannot be written: the disk is full, or a permission is gone.

All ranks learn of it together (``train/survive/saving.py``), and older checkpoints are intact; whether the run goes on
without is the policy's to say. Nothing is lost by going on but the way back to this step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from paceline.errors import CheckpointError
from paceline.health.diagnosis import Stop
from paceline.records.records import EventRecord
from paceline.train.survive.recovery import on_full_disk
from paceline.train.survive.saving import Saver
from paceline.train.trainer import StepResult, Trainer


@dataclass(frozen=True, slots=True)
class ForgivingSaver:
    """Saves by another hook, and goes on where that fails and the policy allows it."""

    saver: Saver
    policy: Literal["stop", "warn"]

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Saves if it is due. Raises CheckpointError, on all ranks, where the run cannot go on without."""
        try:
            self.saver(trainer, result)
        except CheckpointError as error:
            if isinstance(on_full_disk(self.policy, is_last=result.is_last), Stop):
                raise
            if trainer.sink is not None:
                detail = {"reason": str(error).splitlines()[0]}
                trainer.sink.write(EventRecord(name="not_saved", step=result.step, detail=detail, time=time.time()))
            trainer.parts.meter.start()

    def save_now(self, trainer: Trainer) -> None:
        """Saves for a process that is about to end. What an earlier save could not do does not keep this one from it.

        Raises CheckpointError, on all ranks, if this one cannot be written.
        """
        try:
            self.saver.finish()
        except CheckpointError:
            self.saver.last_saved = None  # it may be of this very step
        trainer.parts.engine.world.barrier()  # some rank may still remove what a failed save of this step has left
        self.saver.save_now(trainer)
