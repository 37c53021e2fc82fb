"""Hooks that are put around the loop: evaluate, save, tell of the buckets that were chosen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import save_checkpoint
from paceline.comm.objects import broadcast_object
from paceline.errors import CheckpointError
from paceline.monitor.records import EventRecord
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


@dataclass(slots=True)
class CheckpointHook:
    """Saves the full state; rank 0 writes, and all ranks learn whether it worked."""

    folder: Path
    keep: int
    last_step: int = -1

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Saves, once a step."""
        if self.last_step == result.step:
            return
        self.last_step = result.step
        start = time.perf_counter()
        comm = trainer.parts.engine.comm
        state = trainer.state()
        problem = ""
        if comm.rank == 0:
            try:
                save_checkpoint(self.folder, state, keep=self.keep)
            except CheckpointError as error:
                problem = str(error)
        problem = broadcast_object(comm, problem)
        if problem:
            raise CheckpointError(problem)
        if trainer.sink is not None:
            detail = {"folder": str(self.folder), "seconds": round(time.perf_counter() - start, 4)}
            trainer.sink.write(EventRecord(name="checkpoint", step=result.step, detail=detail, time=time.time()))
        trainer.parts.meter.start()
