"""Mistakes in loops of one's own that train on without a word: a run tells of each once, with the rule and the fix."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.objects import gather_objects
from paceline.config.sections import MonitorConfig
from paceline.errors import UsageError, did_you_mean

_ARGUMENTS = ("engine", "optimizer", "loader", "steps", "config", "monitor")  # of a run


def check_arguments(comm: object, name: object, unknown: Mapping[str, object]) -> None:
    """Raises UsageError with all that is wrong about the arguments of a run."""
    problems = []
    if not isinstance(comm, Communicator) or not isinstance(name, str):
        rule = "it takes the communicator, and then a name"
        problems = [f"paceline.Run({comm!r}, {name!r})\n  {rule}\n  give paceline.Run(comm, 'cnn', engine, ...)"]
    elif not name or Path(name).name != name:
        rule = "it is the name of a folder below runs, or below monitor's folder"
        problems = [f"a run with the name {name!r}\n  {rule}\n  give a plain name, such as cnn"]
    for word, value in unknown.items():
        fix = did_you_mean(word, _ARGUMENTS, f"leave it out, or give config={{{word!r}: {value!r}}} to have it shown")
        fix = f"give monitor={{{word!r}: {value!r}}}" if word in MonitorConfig.model_fields else fix
        problems.append(f"paceline.Run(..., {word}={value!r})\n  a run has no such argument\n  {fix}")
    if problems:
        raise UsageError("\n".join(problems))


class OwnChecks:
    """What a run looks at beside its records; ``evaluated`` are the numbers of the last evaluation."""

    def __init__(self, comm: Communicator, loader: Any) -> None:
        if loader is not None and not hasattr(loader, "position"):
            what = f"paceline.Run(...) with a {type(loader).__name__} as its loader"
            fix = "give paceline.shard(loader, comm), or paceline.loader(dataset, comm, batch_size=...)"
            raise UsageError(f"{what}\n  ranks share its batches out, and a run resumes where it was\n  {fix}")
        self._comm, self._told = comm, set[str]()
        self.evaluated: dict[str, float] = {}

    def see_loss(self, step: int, loss: float | None) -> None:
        if loss is not None and not math.isfinite(loss):
            what = f"the loss of rank {self._comm.rank} is {loss} in step {step}"
            rule = "gradients are averaged over ranks: one that is not finite makes the whole model so"
            self._tell(what, rule, "look at its batch; leave updates out where clip_grad_norm_ gives no finite norm")

    def compare(self, values: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
        """Compares what ranks save, and what they evaluated last; called by all of them."""
        own = {name: repr(value) for name, value in {**self.evaluated, **values}.items()}
        has_schedule = optimizer is not None and "initial_lr" in optimizer.param_groups[0]
        if has_schedule and "last_epoch" not in str(own) and self._comm.rank == 0:  # a key of every schedule's state
            rule = "after a resume it would begin again, in the middle of a run"
            fix = 'run.save(schedule=schedule.state_dict()), and schedule.load_state_dict(run.resume()["schedule"])'
            self._tell("the schedule of the learning rate is not saved", rule, fix)
        for rank, other in enumerate(everyone := gather_objects(self._comm, own)):
            if other != everyone[0] and self._comm.rank == 0:
                name = next(each for each in {**own, **other} if own.get(each) != other.get(each))
                here, there = own.get(name, "missing"), other.get(name, "missing")
                what = f"{name} is {here:.60} on rank 0 and {there:.60} on rank {rank}"
                rule = "ranks decide alike, and a checkpoint has the values of rank 0"
                self._tell(what, rule, "take paceline.mean(total, count, comm), which is the same on all ranks")

    def _tell(self, what: str, rule: str, fix: str) -> None:
        if rule not in self._told:
            self._told.add(rule)
            warnings.warn(f"{what}\n  {rule}\n  {fix}", stacklevel=4)
