"""What a target can do, and which there are. A target is a module with these functions: one file for each.

A new target is a file and a line in ``TARGETS``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from paceline.errors import UsageError
from paceline.launch.job import JobState, LaunchJob

TARGETS = {
    "local": "paceline.launch.local",
    "slurm": "paceline.launch.slurm",
    "ssh": "paceline.launch.ssh",
    "ray": "paceline.launch.ray_target",
    "kubernetes": "paceline.launch.kubectl",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMachines:
    """The machines that a target would give to a run: memory of a GPU and of a host, where that is known.

    ``where`` is what they are called in messages. ``notes`` are what else was found out.
    """

    where: str
    device_bytes: float | None = None
    host_bytes: float | None = None
    notes: tuple[str, ...] = ()


class Target(Protocol):
    """How runs get to machines of one kind, and how they are followed there."""

    def machines(self, job: LaunchJob) -> TargetMachines:
        """Asks for the machines. Raises UsageError for what the target has not: a queue, so many nodes, GPUs."""
        ...

    def render(self, job: LaunchJob) -> str:
        """Returns what will be submitted: a script, or manifests."""
        ...

    def submit(self, job: LaunchJob) -> str:
        """Starts the job and returns its id. Raises LaunchError with the target's own words."""
        ...

    def state(self, job: LaunchJob) -> JobState:
        """Says where the job stands."""
        ...

    def cancel(self, job: LaunchJob) -> None:
        """Ends the job, which saves first if it can."""
        ...


def find_target(name: str) -> Target:
    """Returns a target by its name. Raises UsageError for one that there is not."""
    if name not in TARGETS:
        raise UsageError(f"--on {name} is not a target\n  the targets are {', '.join(TARGETS)}\n  give one of them")
    return cast(Target, importlib.import_module(TARGETS[name]))
