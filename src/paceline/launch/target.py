"""What a target can do, and which there are. A target is a module with these functions: one file for each.

A new target is a file and a line in ``TARGETS``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from paceline.errors import UsageError
from paceline.health.exit_codes import FAILED
from paceline.launch.job import JobState, LaunchJob

TARGETS = {
    "local": "paceline.launch.background",
    "slurm": "paceline.launch.slurm",
    "ssh": "paceline.launch.ssh",
    "ray": "paceline.launch.ray_target",
    "kubernetes": "paceline.launch.kubectl",
}
_LOOK_S = 0.2
_ASK_S = 1.0  # the target: Slurm's controller is shared by all users
_READ_BYTES = 2**20


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


def follow(target: Target, job: LaunchJob, write: Callable[[str], None], tell: Callable[[str], None]) -> int:
    """Follows a launched run until it has ended, and returns its exit code.

    ``write`` gets its log as it grows, ``tell`` what the target says of it when that changes.
    """
    read, known, next_ask, state = 0, "", 0.0, JobState(kind="waiting", words="")
    while True:
        if time.monotonic() >= next_ask:
            state = target.state(job)
            next_ask = time.monotonic() + _ASK_S
            if state.words != known and state.kind != "ended":
                tell(f"{job.name}: {state.words}")
            known = state.words
        # A run that is queued again leaves no code: what is there is of its end.
        code = None if job.tasks else job.exit_code()
        if job.log.is_file():
            with job.log.open("rb") as file:
                file.seek(read)
                while block := file.read(_READ_BYTES):
                    read += len(block)
                    write(block.decode("utf-8", "replace"))
        if code is not None or state.kind == "ended":
            code = code if code is not None else state.code if state.code is not None else FAILED
            if job.exit_code() is None:
                tell(f"{job.name}: {state.words}")
            return code
        time.sleep(_LOOK_S)
