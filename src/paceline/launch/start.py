"""From a config and options to a job: the target's machines, the plan for them, and a name that nobody else takes."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from paceline.config import Config, load_config
from paceline.errors import LaunchError, UsageError
from paceline.launch.job import LaunchJob, launches_folder, reserve
from paceline.launch.settle import SettledRun, ranks_of_node, settle
from paceline.launch.target import Target, TargetMachines, find_target
from paceline.run.folder import check_folder, is_taken
from paceline.run.location import run_folder, runs_of

_LAUNCH_S = "-start-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What ``paceline launch`` was asked for: the target and how much of it; see ``LaunchJob`` for the rest."""

    target: str
    nodes: int = 1
    least: int = 1
    gpus: int = 0
    time: str | None = None
    queue: str | None = None
    hosts: tuple[str, ...] = ()
    tasks: str | None = None
    max_requeues: int | None = None
    python: str = sys.executable
    port: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    resume: bool = False
    checks_memory: bool = True
    is_dry: bool = False


_OF_THE_JOB = {each.name for each in fields(LaunchRequest)} & {each.name for each in fields(LaunchJob)}


def prepare(path: Path, overrides: Sequence[str], asked: LaunchRequest) -> tuple[Target, LaunchJob, SettledRun]:
    """Makes the job, and refuses one that cannot run at the target. Nothing is written.

    Raises UsageError, ConfigError, RunFolderError or LaunchError for what is wrong with it.
    """
    target = find_target(asked.target)
    array = [word for word in overrides if "{task}" in word]
    if array and asked.tasks is None:
        raise UsageError(f"{array[0]} without --array\n  {{task}} is the number of an array's task\n  add --array 0-3")
    config = load_config(path, [word.replace("{task}", "0") for word in overrides])
    check_folder(run_folder(config), resume=True)
    nodes = asked.nodes
    ranks = ranks_of_node(config, nodes, asked.gpus)
    job = LaunchJob(
        name="",
        run=_free_run(config, resumes=asked.resume),
        config=str(path.absolute()),
        overrides=tuple(overrides),
        workdir=str(Path.cwd()),
        folder="",
        ranks=ranks,
        **{name: getattr(asked, name) for name in _OF_THE_JOB},
    )
    job = _at(job, config, job.run)
    try:
        machines = target.machines(job)
    except LaunchError as error:  # the target does not answer: what would be submitted can be shown all the same
        if not asked.is_dry:
            raise UsageError(str(error)) from error  # nothing was started
        given = getattr(target, "given", None)  # what is known without asking: the memory that a pod asks for
        known = TargetMachines(where=f"--on {asked.target}") if given is None else given(job)
        machines = replace(known, notes=(f"not asked for its machines: {error.headline}",))
    if not asked.checks_memory:
        machines = TargetMachines(where=machines.where, notes=machines.notes)
    settled = settle(config, machines, least=job.least, nodes=nodes, gpus=asked.gpus)
    return target, replace(job, overrides=(*overrides, *settled.overrides)), settled


def start(target: Target, job: LaunchJob) -> LaunchJob:
    """Reserves a name for the launch, submits the job, and writes down where it is."""
    runs = Path(job.folder).parent.parent
    names = itertools.chain([job.run], (f"{job.run}{_LAUNCH_S}{number}" for number in itertools.count(2)))
    folder = next(found for name in names if (found := reserve(runs, name)) is not None)
    job = replace(job, name=folder.name, folder=str(folder))
    try:
        job = replace(job, id=target.submit(job))
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        with contextlib.suppress(OSError):  # until one that has something in it
            for path in (folder, folder.parent, runs):
                path.rmdir()
        raise
    job.write()
    return job


def _at(job: LaunchJob, config: Config, name: str) -> LaunchJob:
    folder = launches_folder(Path(config.monitor.folder).absolute()) / name
    return replace(job, name=name, folder=str(folder))


def _free_run(config: Config, *, resumes: bool) -> str:
    """Returns the name of the run: a new one, or with ``resumes`` the newest of this name.

    Every start of a job continues the run, so that the name may not be another run's, nor one that a job will have.
    """
    if resumes:
        runs = runs_of(config)
        if not runs:
            raise UsageError(f"--resume, and there is no run in {run_folder(config)}\n  leave it out for a new run")
        return runs[0].name
    first = run_folder(config)
    names = itertools.chain([first.name], (f"{first.name}-{number}" for number in itertools.count(2)))
    launches = launches_folder(first.parent)
    return next(
        name
        for name in names
        if not is_taken(first.with_name(name))
        and not (launches / name).exists()
        and not runs_of(config.model_copy(update={"name": name}))
    )
