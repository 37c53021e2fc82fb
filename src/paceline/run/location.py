"""How a run is asked for, where it lives and from which checkpoint it starts, and what came of it.

A name that is taken gets a number: ``runs/digits``, ``runs/digits-2``, ``runs/digits-3``. Each of these keeps the name
that was asked for in ``.name`` (``folder.py``): a run that somebody called digits-2 is not taken for one of them.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.chaos.faults import VARIABLE
from paceline.errors import CheckpointError, LaunchError, RunFolderError, UsageError
from paceline.notebook import Shown, curve
from paceline.records.records import StepRecord, read_records
from paceline.records.report import RunSummary, summarize
from paceline.records.summary import open_run
from paceline.run.folder import RunFolder, check_folder, claim_folder, find_write_error, is_taken, name_of
from paceline.run.logs import say

if TYPE_CHECKING:
    from paceline.checkpoint.manifest import Line
    from paceline.config import Config
    from paceline.run.whereami import Surroundings
    from paceline.search.automatic import Choice

_SCHEDULERS = (
    *("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"),
    *("TORCHELASTIC_RUN_ID", "PACELINE_LAUNCH", VARIABLE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run is started.

    ``force`` replaces a run folder of the same name. ``resume`` continues from a checkpoint: ``auto``, ``last`` and
    ``latest`` stand for the newest, unless a file has that name. ``is_quiet`` hides progress; ``is_verbose`` shows the
    lines of the run's log in its place. ``checks_memory`` refuses a run that is estimated to need too much memory.
    """

    force: bool = False
    resume: str | None = None
    is_quiet: bool = False
    is_verbose: bool = False
    checks_memory: bool = True
    hosts: Surroundings | None = None

    def __post_init__(self) -> None:
        if self.resume in ("last", "latest") and not Path(self.resume).exists():
            object.__setattr__(self, "resume", "auto")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult(Shown):
    """A finished run. ``choice``: how an open strategy was chosen; ``has_trained``: after its checkpoint."""

    folder: Path
    config: Config
    summary: RunSummary
    last_step: int
    choice: Choice | None = None
    has_trained: bool = True

    @property
    def final_loss(self) -> float | None:
        return self.summary.final_loss

    def facts(self) -> dict[str, object]:
        return {**self.summary.facts(), "folder": self.folder}

    def charts(self) -> list[str]:
        try:
            records = list(read_records(self.folder / "records" / "rank-0.jsonl"))
        except (OSError, ValueError):  # the folder was removed since, or somebody changed it
            return []
        return [curve("training loss", [each.loss for each in records if isinstance(each, StepRecord)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocation:
    """Where a run lives and starts from. ``takes_number``: what is taken meanwhile is left for the next number."""

    folder: Path
    checkpoint: Path | None = None
    is_continued: bool = False
    takes_number: bool = False

    def named_config(self, config: Config) -> Config:
        """Returns the config under the run's own name. Its checkpoints have a folder of their own, too."""
        if config.name == self.folder.name:
            return config
        asked = config.checkpoint.folder
        if asked is not None:
            config = config.with_values("checkpoint", folder=f"{asked.rstrip('/')}/{self.folder.name}")
        return config.model_copy(update={"name": self.folder.name})


def run_folder(config: Config) -> Path:
    return Path(config.monitor.folder) / config.name


def runs_of(config: Config) -> list[Path]:
    """Returns the folders of all runs of a config's name, the one that was started or continued last first."""
    return runs_named(run_folder(config))


def runs_named(first: Path) -> list[Path]:
    """Returns the folder of a run and those of its name that got a number, the last one first."""
    numbered = first.parent.glob(f"{glob.escape(first.name)}-*")
    others = [path for path in numbered if path.name.removeprefix(f"{first.name}-").isdecimal()]
    others = [path for path in others if name_of(path) == first.name]
    runs = [path for path in (first, *others) if (path / "config.yaml").is_file()]
    return sorted(runs, key=lambda path: ((path / "config.yaml").stat().st_mtime_ns, path.name), reverse=True)


def locate_run(
    config: Config, *, force: bool, resume: str | None, may_number: bool = True, may_begin: bool = False
) -> RunLocation:
    """Finds a run's folder, and the checkpoint to start from; changes nothing.

    ``resume`` is ``auto`` (the newest checkpoint of the newest run of that name), ``best`` (its best), or a path. A
    name that is taken gets a number, unless ``force`` replaces the run, or not ``may_number``. ``auto`` begins a run
    that ended before its first step, or that a scheduler starts, or with ``may_begin`` any. Raises RunFolderError if
    the folder may not be used, CheckpointError if there is no such checkpoint or none could be written.
    """
    _check_checkpoint_folder(config.checkpoint.folder)
    if resume is None:
        return _new_run(config, force=force, may_number=may_number)
    try:
        location = _resumed(config, resume, force=force)
    except CheckpointError:
        folder = next(iter(runs_of(config)), run_folder(config))
        # What starts the same command again also starts a run that had nothing to save yet.
        may_begin = may_begin or any(name in os.environ for name in _SCHEDULERS) or _ended_before_training(folder)
        if resume != "auto" or not may_begin:
            raise
        say(f"no checkpoint in {folder} yet: starting from the beginning")
        is_continued = (folder / "config.yaml").is_file()
        check_folder(folder, force=force, resume=is_continued)
        return RunLocation(folder=folder, is_continued=is_continued)
    if location.is_continued and force:
        what = f"--force would remove {location.folder}, from which --resume {resume} continues"
        raise UsageError(f"{what}\n  one replaces a run, the other goes on with it\n  give one of them")
    check_folder(location.folder, force=force, resume=location.is_continued)
    return location


def _ended_before_training(folder: Path) -> bool:
    """Says whether there is a run that has neither saved nor trained a step: it left with code 75, or was killed."""
    from paceline.checkpoint.find import places_of

    if not (folder / "config.yaml").is_file() or any(next(each.glob("step-*"), None) for each in places_of(folder)):
        return False
    try:
        return not any(isinstance(each, StepRecord) for each in read_records(folder / "records" / "rank-0.jsonl"))
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError)


def claim_run(
    location: RunLocation, config: Config, plan_json: str = "", *, force: bool = False
) -> tuple[RunFolder, RunLocation]:
    """Claims the folder of a run, or the next number's where it was taken since. Raises RunFolderError."""
    from paceline.config import dump_yaml

    while True:
        text = dump_yaml(location.named_config(config))
        resume = location.is_continued
        try:
            made = claim_folder(location.folder, text, plan_json, force=force, resume=resume, name=config.name)
            return made, location
        except RunFolderError:
            if not location.takes_number or not is_taken(location.folder):
                raise
        location = replace(location, folder=next_folder(run_folder(config)))


def find_start(
    config: Config,
    folder: Path,
    resume: str,
    tell: Callable[[str], None],
    own: Line | None = None,
    memory: Path | None = None,
) -> Path:
    """Finds the checkpoint that ``resume`` names; ``auto``: the newest whole one of the run's line ``own``; ``best``.

    ``auto`` looks at the snapshots in the memory of hosts, too, for a host that has ``memory`` for them. ``tell`` hears
    of newer ones that are not whole, and why a snapshot was chosen. Raises CheckpointError where there is none.
    """
    from paceline.checkpoint import find_best, find_checkpoint
    from paceline.checkpoint.find import places_of, read_manifest, spots_in
    from paceline.checkpoint.manifest import newest_line
    from paceline.checkpoint.storage import snapshots_in

    where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    depth, snapshot = config.checkpoint.verify, None
    if resume == "best":
        return find_best(where, depth)
    if memory is not None and resume == "auto":
        try:
            snapshot = find_checkpoint(resume, snapshots_in(memory), depth, lambda passed: tell(str(passed)), own)
        except CheckpointError as error:
            tell(f"passed over the memory of hosts: {error.headline}")
    if snapshot is not None:
        here = read_manifest(snapshot).spot
        spots = [spot for place in places_of(where) for spot in spots_in(place).values()]
        line = newest_line([*spots, here], own)
        last = max((each.step for each in spots if line.has(each.line, each.step)), default=None)
        if line.has(here.line, here.step) and (last is None or last <= here.step):
            if last is not None:
                tell(f"passed over what is on disk: step {last} is before the snapshot of step {here.step}")
            return snapshot
        tell(f"passed over the snapshot of step {here.step}: what is on disk is newer")
    return find_checkpoint(resume, where, depth, lambda passed: tell(str(passed)), own)


def how_to_continue(folder: Path) -> str:
    """Returns the words that say how to go on from the newest checkpoint, if there is one."""
    from paceline.checkpoint.find import list_checkpoints, places_of

    found = next(filter(None, map(list_checkpoints, places_of(folder))), None)
    if found is None:
        return ""
    command = shlex.join(["paceline", "train", str(folder / "config.yaml"), "--resume", "auto"])
    return f"to go on from step {int(found[-1].name.rpartition('-')[2])}:  {command}"


def _new_run(config: Config, *, force: bool, may_number: bool = True, checkpoint: Path | None = None) -> RunLocation:
    """Returns the folder of a run that does not continue another: the asked one, or where it is taken the next."""
    folder = run_folder(config)
    if not force and may_number and is_taken(folder):
        check_folder(folder, resume=True)  # what is above it
        free = next_folder(folder)
        rest = "--resume auto goes on with the last one, --force replaces the first"
        _say_once(f"{folder} exists: this run is {free} ({rest})")
        return RunLocation(folder=free, checkpoint=checkpoint, takes_number=True)
    check_folder(folder, force=force)
    return RunLocation(folder=folder, checkpoint=checkpoint, takes_number=may_number and not force)


def _say_once(text: str) -> None:
    """Says something that every rank of a launcher finds: the first of them tells it."""
    if os.environ.get("RANK", "0") == "0":
        say(text)


def next_folder(first: Path) -> Path:
    """Returns a folder if nothing is there, or the next one of its name with a number."""
    return next(path for path in map(first.with_name, numbered(first.name)) if not is_taken(path))


def numbered(name: str) -> Iterator[str]:
    """Yields a name, and without an end the same with a number: digits, digits-2, digits-3."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def _resumed(config: Config, resume: str, *, force: bool) -> RunLocation:
    """Returns the run that ``resume`` continues, or a new one from another's checkpoint. Raises CheckpointError."""
    from paceline.checkpoint.storage import absolute_path

    first = run_folder(config)
    runs = runs_of(config) or [first]
    if resume not in ("auto", "best"):
        checkpoint = absolute_path(find_start(config, first, resume, say))
        # A numbered run's folder of checkpoints may lie in that of the first.
        for folder in sorted({*runs, first}, key=lambda path: (path == first, path.name)):
            asked = RunLocation(folder=folder).named_config(config).checkpoint.folder
            where = absolute_path(folder if asked is None else Path(asked))  # its checkpoints, and nobody else's
            if checkpoint.is_relative_to(where) or checkpoint.is_relative_to(folder.resolve()):
                return RunLocation(folder=folder, checkpoint=checkpoint, is_continued=folder.is_dir())
        return _new_run(config, force=force, checkpoint=checkpoint)
    problem: CheckpointError | None = None
    for folder in runs:
        try:
            found = find_start(RunLocation(folder=folder).named_config(config), folder, resume, say)
        except CheckpointError as error:
            problem = problem or error
            continue
        if len(runs) > 1:
            which = "the last one with a checkpoint" if problem else "the last one"
            _say_once(f"continuing {folder}: {which} of {len(runs)} runs named {config.name}")
        return RunLocation(folder=folder, checkpoint=absolute_path(found), is_continued=folder.is_dir())
    assert problem is not None
    raise problem


def _check_checkpoint_folder(where: str | None) -> None:
    if where is None:
        return
    from paceline.checkpoint.storage import cannot_write, is_remote, storage_of

    if is_remote(where):
        storage_of(Path(where))  # says which package is missing
        return
    error = find_write_error(Path(where))
    if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):  # room may come: recovery.on_full_disk
        raise cannot_write(Path(where), error, name="checkpoint.folder")


def read_result(folder: Path, config: Config, choice: Choice | None = None) -> RunResult:
    """Reads what a run did from its records. Raises LaunchError if it is not finished."""
    records = open_run(folder)
    summary, last = summarize(folder, records), records.lead[-1]
    if summary.status != "done":
        what = f"the ranks left before the run was done: it is {summary.status}, at step {summary.steps}"
        raise LaunchError(f"{what}\n  their logs are in {folder / 'logs'}")
    step, has_trained = 0 if last.end is None else last.end.step, bool(last.steps)
    result = RunResult(folder=folder, config=config, summary=summary, last_step=step)
    return replace(result, choice=choice, has_trained=has_trained)
