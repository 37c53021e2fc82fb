"""What a step of a loop of one's own leaves: its numbers, and the phases that it passed through."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from paceline.health.ledger_view import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER
from paceline.records.meter import StepMeter
from paceline.records.records import EventRecord


@dataclass(slots=True)
class StepNumbers:
    """What a step computed, on its device; a loss that was not told has a count of 0."""

    loss_sum: torch.Tensor
    count: torch.Tensor | float
    grad_norm: torch.Tensor
    loss_scale: torch.Tensor | None = None


@dataclass(slots=True)
class OwnStep:
    """A step that is over on the host, and may still run on the device."""

    step: int
    position: int
    lr: float
    epoch: float
    samples: int
    outcome: StepNumbers
    has_norm: bool
    names: list[str]
    values: torch.Tensor  # of the names, on the host once the step is over

    def event(self, now: float) -> EventRecord:
        detail = dict(zip(self.names, self.values.tolist(), strict=True))
        return EventRecord(name="scalars", step=self.step, detail=detail, time=now)


@dataclass(slots=True)
class Phases:
    """Ends laps of the meter as the engine and the optimizer begin something else."""

    meter: StepMeter
    now: str = DATA
    is_in_step: bool = False
    evaluates_since: float | None = None

    def enter(self, phase: str) -> None:
        if not self.is_in_step:
            if phase == EVALUATION and self.evaluates_since is None:
                self.evaluates_since = time.time()
        elif phase != self.now and phase in (DATA, FORWARD, BACKWARD, OPTIMIZER):
            self.meter.lap(self.now)
            self.now = phase
