"""Hooks of the trainer: what runs every n steps, and what records the decisions of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from paceline.engines.compiled import take_notes
from paceline.train.step import StepResult
from paceline.train.trainer import Hook, Trainer


@dataclass(slots=True)
class Every:
    """Runs a hook every ``steps`` steps, or after each epoch, and after the last step if ``at_end``."""

    steps: int | Literal["epoch"] | None
    hook: Hook
    at_end: bool = True

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        steps = max(result.steps_per_epoch, 1) if self.steps == "epoch" else self.steps
        is_due = steps is not None and result.step % steps == 0
        if is_due or (self.at_end and result.is_last):
            self.hook(trainer, result)


def is_time(trainer: Trainer, since: float, seconds: float) -> bool:
    """Says whether so many seconds have passed since a moment, by rank 0's clock. All ranks ask; one broadcast."""
    comm = trainer.parts.engine.world
    due = torch.tensor([float(time.monotonic() - since >= seconds)], device=comm.device)
    comm.broadcast(due).wait()
    return bool(due.item())  # sync point


@dataclass(slots=True)
class EvaluateHook:
    """Evaluates over all ranks; the result goes to the records. Ends a run that does not get better, where asked to."""

    last_step: int = -1

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if self.last_step != result.step:
            self.last_step = result.step
            trainer.evaluate()
            if trainer.early_stop.is_over and not result.is_last:
                result.is_last = True  # for what comes at the end, such as the last checkpoint
                trainer.end_reason = trainer.early_stop.reason
                trainer.note("early_stop", {"note": trainer.end_reason}, step=result.step)


@dataclass(slots=True)
class CompileHook:
    """Records what was compiled and how long that took, and what could not be."""

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if result.step > 3 and result.step % 100 and not result.is_last:
            return
        notes = take_notes(trainer.parts.engine.module, getattr(trainer.parts.loss, "sum", None))
        done = [note for note in notes if not note.problem]
        if done:
            seconds = sum(note.seconds for note in done)
            trainer.note("compiled", {"what": "; ".join(note.what for note in done), "seconds": round(seconds, 1)})
        for note in notes:
            if note.problem:
                trainer.note("not_compiled", {"what": note.what, "why": note.problem})


@dataclass(slots=True)
class NoteHook:
    """Records once what was decided: before the first step, or by a function that returns it when it has come."""

    name: str
    detail: dict[str, Any] | Callable[[Trainer], dict[str, Any] | None]
    is_recorded: bool = False

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        detail = None if self.is_recorded else self.detail(trainer) if callable(self.detail) else self.detail
        if detail is not None:
            self.is_recorded = True
            trainer.note(self.name, detail, step=result.step)


def bucket_choice(trainer: Trainer) -> dict[str, Any] | None:
    """Returns the buckets that the engine has chosen, once it has."""
    choice = trainer.parts.engine.bucket_choice
    return None if choice is None else {**choice.detail()}
