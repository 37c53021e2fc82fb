"""Saving a run: when, in the background or at once, and what is kept.

The saver is a hook. It saves every n steps or epochs, every so many minutes of rank 0's clock, where an evaluation is
the best so far (``keep_best``), at the end, and when it is asked to. What a save took goes to the records when it has
come to its end: how long training stood still, and how long it was under way.

A checkpoint that cannot be written (the disk is full, or a permission is gone) is an error that all ranks learn of
together, and older checkpoints are intact. The run goes on without it where ``on_full_disk`` allows that: nothing is
lost by going on but the way back to this step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.find import spots_in
from paceline.checkpoint.manifest import Spot, line_from
from paceline.checkpoint.retention import retention_of
from paceline.checkpoint.storage import FileStore
from paceline.checkpoint.writer import CheckpointWriter
from paceline.config import CheckpointConfig
from paceline.errors import CheckpointError
from paceline.train.step import StepResult
from paceline.train.trainer import Trainer, is_time

_AT_ONCE = ("end", "preempted", "final")  # reasons after which the process may end
_WORTH_BYTES = 2**25  # what is smaller is written before a copy of it would pay


class Saver:
    """Saves a trainer's state into a folder. All ranks call it at the same steps."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        about: Mapping[str, Any] | None = None,
        storage: FileStore | None = None,
        on_full_disk: Literal["stop", "warn"] = "stop",
        ask_every: int = 10,
    ) -> None:
        """``about`` is what the run is, for whoever looks at a checkpoint: JSON values; ``storage`` None: as usual.

        ``ask_every``: steps after which ranks ask rank 0's clock.
        """
        self._on_full_disk = on_full_disk
        self.folder = folder
        self.last_saved: int | None = None
        self._config = config
        self._retention = retention_of(config.model_dump())
        self._ask_every = ask_every
        self._about = dict(about or {})
        self._storage = storage
        self._writer: CheckpointWriter | None = None
        self._clock = time.monotonic()
        self._trainer: Trainer | None = None
        self._is_in_background = False

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Saves if it is time to, and tells of what has been written since.

        Raises CheckpointError, on all ranks, where that fails and the run cannot go on without.
        """
        try:
            if self.last_saved is not None and result.step < self.last_saved:
                self.last_saved = None  # the run went back
            if self._writer is None and self._saves_on_the_way and not result.is_last:
                self._prepare(trainer)
            reason = self._reason(trainer, result)
            if reason:
                self.save(trainer, reason)
            if result.is_last:
                self.finish()
            self._tell(trainer)
        except CheckpointError as error:
            if self._on_full_disk == "stop" or result.is_last:
                raise
            trainer.note("not_saved", {"reason": str(error).splitlines()[0]}, step=result.step)
            trainer.parts.meter.start()

    def save(self, trainer: Trainer, reason: str) -> None:
        """Saves the state after the last step, once a step; at once where the process may end after it.

        Called by all ranks after the same step. Raises CheckpointError on all of them if one could not write this one,
        or the one before; older checkpoints are intact.
        """
        self._trainer = trainer
        if self.last_saved == trainer.step:
            if reason in _AT_ONCE:
                self.finish()
            return
        trainer.parts.meter.enter("checkpoint")
        writer, state = self._writer or self._prepare(trainer), trainer.state()
        if self._is_best(trainer):
            metric = self._retention.metric
            trainer.best = {"metric": metric, "value": trainer.metrics[metric], "step": trainer.step}
        values = {**state.values, "best": trainer.best}
        state = dataclasses.replace(state, values=values, about={**self._about, "reason": reason})
        writer.save(state, in_background=self._is_in_background and reason not in _AT_ONCE)
        self.last_saved = trainer.step
        self._tell(trainer)
        trainer.parts.meter.start()

    def save_now(self, trainer: Trainer) -> None:
        """Saves for a process that is about to end. What an earlier save could not do does not keep this one from it.

        Raises CheckpointError, on all ranks, if this one cannot be written.
        """
        try:
            self.finish()
        except CheckpointError:
            self.last_saved = None  # it may be of this very step
        trainer.parts.engine.world.barrier()  # some rank may still remove what a failed save of this step has left
        self.save(trainer, "preempted")
        self.finish()

    def finish(self) -> None:
        """Waits for what is being written. Raises CheckpointError on all ranks if one of them could not."""
        if self._writer is not None:
            self._writer.finish()
            if self._trainer is not None:
                self._tell(self._trainer)

    @property
    def _saves_on_the_way(self) -> bool:
        config = self._config
        return config.asynchronous is not False and any((config.every_steps, config.every_epochs, config.every_minutes))

    def _prepare(self, trainer: Trainer) -> CheckpointWriter:
        """Makes the writer, and room to save in the background. All ranks call it when the optimizer has its state."""
        self._writer = CheckpointWriter(self.folder, trainer.parts.engine.world, self._retention, self._storage)
        if trainer.parts.engine.world.rank == 0:
            # Goes on with the trainer's line, or a new one where later steps lie that it did not come along.
            here = None if trainer.line is None else Spot(line=trainer.line, step=trainer.step)
            trainer.line = line_from(here, list(spots_in(self.folder, self._storage).values()))
        if self._saves_on_the_way:
            worth = _WORTH_BYTES if self._config.asynchronous == "auto" else 0
            self._is_in_background = self._writer.reserve(trainer.collect_state(), worth)
        return self._writer

    def _reason(self, trainer: Trainer, result: StepResult) -> str:
        config, step, reason = self._config, result.step, ""
        minutes = config.every_minutes
        epochs = config.every_epochs
        if config.every_steps is not None and step % config.every_steps == 0:
            reason = "steps"
        elif epochs is not None and step % (epochs * max(result.steps_per_epoch, 1)) == 0:
            reason = "epochs"
        elif config.keep_best and self._is_best(trainer):
            reason = "best"
        if minutes is not None and step % self._ask_every == 0 and is_time(trainer, self._clock, 60.0 * minutes):
            self._clock = time.monotonic()
            reason = "minutes"
        return "end" if config.at_end and result.is_last else reason

    def _is_best(self, trainer: Trainer) -> bool:
        """Says whether this step was evaluated, and is better than all that were saved before."""
        policy, known = self._retention, trainer.best
        value = trainer.metrics.get(policy.metric) if trainer.metrics.get("step") == trainer.step else None
        if value is None or value != value:
            return False
        if known is None or known["metric"] != policy.metric:
            return True
        return bool(value < known["value"] if policy.mode == "min" else value > known["value"])

    def _tell(self, trainer: Trainer) -> None:
        for report in [] if self._writer is None else self._writer.reports():
            detail = {
                "folder": str(self.folder),
                "seconds": round(report.total_s, 4),
                "stall_seconds": round(report.stall_s, 4),
                "bytes": report.num_bytes,
                "background": report.is_background,
            }
            trainer.note("checkpoint", detail, step=report.step)
