"""A run that goes back to its last checkpoint, in the same processes.

Losses that jump are found in the sums of ``preemption.py``: every rank has the same numbers, so that all decide alike,
without another word. What is done is decided by ``recovery.py``. To go back takes one broadcast of which checkpoint it
is, and its load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.errors import CheckpointError, TrainingError
from paceline.records.records import EventRecord
from paceline.train.survive.preemption import Common
from paceline.train.survive.recovery import GoBack, GoOn, LossPolicy, Spike, find_spike, on_spike
from paceline.train.trainer import GoBackError, Trainer


@dataclass(frozen=True, slots=True)
class CheckpointReturn:
    """Goes back to the newest checkpoint: ``find`` names it on rank 0, ``load`` brings it into the trainer."""

    find: Callable[[], Path | None]
    load: Callable[[Trainer, Path], None]

    def newest(self, comm: Communicator) -> Path | None:
        """Returns the newest checkpoint, the same on all ranks; None without one. One broadcast."""
        path: Path | None = None
        if comm.rank == 0:
            try:
                path = self.find()
            except CheckpointError:
                path = None
        found: Path | None = broadcast_object(comm, path)
        return found


@dataclass(slots=True)
class SpikeListener:
    """Looks at the loss of each step over all ranks, and reacts when it jumps."""

    policy: LossPolicy
    _losses: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, trainer: Trainer, common: Common) -> None:
        """Notes a loss. Raises GoBackError or TrainingError if it is a spike and the policy says so."""
        policy = self.policy
        # After the run went back, steps come again.
        self._losses = [known for known in self._losses if known[0] < common.step][-policy.spike_window :]
        spike = find_spike(
            [loss for _, loss in self._losses],
            common.loss,
            by=policy.spike_by,
            threshold=policy.spike_threshold,
            window=policy.spike_window,
        )
        if spike is not None:
            self._react(trainer, common, spike)
        self._losses.append((common.step, common.loss))

    def _react(self, trainer: Trainer, common: Common, spike: Spike) -> None:
        reaction = on_spike(
            self.policy,
            spike,
            num_roll_backs=trainer.num_roll_backs,
            has_checkpoint=trainer.has_checkpoint(),
        )
        if isinstance(reaction, GoOn):
            if trainer.sink is not None and reaction.is_noted:
                detail = {"loss": spike.loss, "median": spike.median, "times": spike.times}
                trainer.sink.write(EventRecord(name="spike", step=common.step, detail=detail, time=time.time()))
        elif isinstance(reaction, GoBack):
            raise GoBackError(reaction, step=common.step, position=common.position)
        else:
            raise TrainingError(
                f"{reaction.reason} at step {common.step}\n  recovery.on_spike = {self.policy.on_spike}\n"
                "  lower optim.lr, set optim.clip_norm, or look at the data of that step"
            )
