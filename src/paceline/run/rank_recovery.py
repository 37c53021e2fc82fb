"""What a rank's trainer needs to survive: its hooks, the checkpoint to start from, the way back to the last one."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.chaos.notes import VARIABLE
from paceline.checkpoint import find_checkpoint, open_checkpoint
from paceline.checkpoint.line import Line
from paceline.checkpoint.storage import Storage
from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.config import Config
from paceline.errors import CheckpointError
from paceline.run.notes import StepNote
from paceline.run.records import name_strategy
from paceline.train.survive.consensus import ConsensusHook, Listener, SpikeListener, StopWhenAsked
from paceline.train.survive.recovery import LossPolicy, StopRequest
from paceline.train.survive.saving import ForgivingSaver, Saver, save_policy
from paceline.train.trainer import EvaluateHook, Every, Hook, StepResult, Trainer, WayBack

if TYPE_CHECKING:
    from paceline.chaos.inject import Injector


def make_hooks(config: Config, folder: Path, request: StopRequest, storage: Storage | None = None) -> list[Hook]:
    """Returns what runs after each step: evaluation, saving, and the ranks' agreement about stopping and losses."""
    hooks: list[Hook] = [Every(config.train.eval_every, EvaluateHook())]
    policy = save_policy(config.checkpoint, ask_every=config.monitor.log_every)
    save = Saver(_checkpoint_folder(config, folder), policy, about=_about(config), storage=storage)
    forgiving = ForgivingSaver(save, config.recovery.on_full_disk)
    hooks.append(forgiving)
    # The last: a wish to stop is obeyed when everything else of the step is done, and is not saved twice.
    listeners: list[Listener] = [StopWhenAsked(request, forgiving.save_now)]
    watches = config.recovery.on_spike != "ignore"
    if watches:
        listeners.insert(0, SpikeListener(_loss_policy(config)))
    hooks.append(ConsensusHook(request, listeners, needs_losses=watches))
    return hooks


class NoteStep:
    """Notes each step for the launcher."""

    def __init__(self, note: StepNote) -> None:
        self._note = note

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        del trainer
        self._note.write(result.step)


def find_together(config: Config, comm: Communicator, folder: Path, resume: str | Path | None) -> Path | None:
    """Returns the checkpoint to start from, the same on all ranks; None with ``auto`` where there is none yet."""
    if resume is None or str(resume) != "auto":
        return None if resume is None else Path(resume)

    found: Path | None = None
    if comm.rank == 0:
        with contextlib.suppress(CheckpointError):
            found = _newest(config, folder)
    return broadcast_object(comm, found)


def load_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Loads a checkpoint into a trainer."""
    trainer.load_state(open_checkpoint(checkpoint))


def prepare_recovery(config: Config, trainer: Trainer, folder: Path) -> None:
    """Gives the trainer its policy for bad losses, and the way back to the last checkpoint."""
    trainer.losses = _loss_policy(config)
    trainer.way_back = WayBack(lambda: _newest(config, folder, trainer.line), load_checkpoint)


def find_faults(config: Config, folder: Path, rank: int) -> Injector | None:
    """Returns the faults that ``paceline chaos`` has for this rank; None in every other run."""
    where = os.environ.get(VARIABLE)
    if where is None:
        return None
    from paceline.chaos.inject import Injector

    return Injector(Path(where), rank, _checkpoint_folder(config, folder))


def _newest(config: Config, folder: Path, own: Line | None = None) -> Path:
    """Finds the newest checkpoint of a run's line that is whole; tells in the log of those that are not."""
    where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    return find_checkpoint("auto", where, config.checkpoint.verify, lambda passed: print(passed, file=sys.stderr), own)


def _checkpoint_folder(config: Config, folder: Path) -> Path:
    return folder / "checkpoints" if config.checkpoint.folder is None else Path(config.checkpoint.folder)


def _loss_policy(config: Config) -> LossPolicy:

    return LossPolicy(**{each.name: getattr(config.recovery, each.name) for each in fields(LossPolicy)})


def _about(config: Config) -> dict[str, Any]:
    """Returns what a checkpoint tells of the run that it belongs to."""
    parallel = config.parallel
    ranks = parallel.ranks if isinstance(parallel.ranks, int) else 0
    mesh = {name: getattr(parallel, name) for name in ("pipeline", "tensor")}
    strategy = name_strategy(config, ranks)
    return {"name": config.name, "strategy": strategy, "mesh": mesh, "config": config.model_dump(mode="json")}
