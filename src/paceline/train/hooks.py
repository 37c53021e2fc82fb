"""Hooks that are put around the loop: evaluate, tell of the buckets that were chosen. See also saving.py."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.records.records import EventRecord
from paceline.train.trainer import StepResult, Trainer


@dataclass(slots=True)
class EvaluateHook:
    """Evaluates over all ranks; the result goes to the records."""

    last_step: int = -1

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Evaluates, once a step."""
        if self.last_step != result.step:
            self.last_step = result.step
            trainer.evaluate()


@dataclass(slots=True)
class BucketHook:
    """Records the buckets that the engine has chosen, when it has."""

    is_told: bool = False

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Looks whether there is a choice by now."""
        choice = None if self.is_told else trainer.parts.engine.bucket_choice
        if choice is not None and trainer.sink is not None:
            self.is_told = True
            trainer.sink.write(
                EventRecord(name="buckets", step=result.step, detail={**choice.detail()}, time=time.time())
            )
