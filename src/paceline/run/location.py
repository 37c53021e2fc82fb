"""Where a run lives, and from which checkpoint it starts: looked at before anything else is done."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.chaos.notes import VARIABLE
from paceline.errors import CheckpointError, UsageError
from paceline.run.console import say
from paceline.run.folder import check_folder, find_write_error

if TYPE_CHECKING:
    from paceline.checkpoint.manifest import Line
    from paceline.config import Config

_SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "TORCHELASTIC_RUN_ID", VARIABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocation:
    """Where a run lives and where it starts from. ``is_continued``: from a checkpoint of its own."""

    folder: Path
    checkpoint: Path | None = None
    is_continued: bool = False


def run_folder(config: Config) -> Path:
    """Returns the folder of a config's run."""
    return Path(config.monitor.folder) / config.name


def locate_run(config: Config, *, force: bool, resume: str | None) -> RunLocation:
    """Finds a run's folder, and the checkpoint to start from; changes nothing.

    Raises RunFolderError if the folder may not be used, CheckpointError if there is no such checkpoint or if none could
    be written to ``checkpoint.folder``.
    """
    folder = run_folder(config)
    _check_checkpoint_folder(config.checkpoint.folder)
    if resume is None:
        check_folder(folder, force=force)
        return RunLocation(folder=folder)
    from paceline.checkpoint.storage import absolute_path

    try:
        checkpoint = absolute_path(find_start(config, folder, resume, say))
    except CheckpointError:
        if resume != "auto" or not any(name in os.environ for name in _SCHEDULERS):
            raise
        # A scheduler starts the same command again: also a run that had nothing to save yet.
        say(f"no checkpoint in {folder} yet: starting from the beginning")
        check_folder(folder, force=force, resume=(folder / "config.yaml").is_file())
        return RunLocation(folder=folder, is_continued=(folder / "config.yaml").is_file())
    is_continued = resume == "auto" or checkpoint.is_relative_to(folder.resolve())
    if is_continued and force:
        raise UsageError(
            f"--force would remove {folder}, from which --resume {resume} continues\n"
            "  one replaces a run, the other goes on with it\n  give one of them"
        )
    check_folder(folder, force=force, resume=is_continued)
    return RunLocation(folder=folder, checkpoint=checkpoint, is_continued=is_continued)


def find_start(config: Config, folder: Path, resume: str, tell: Callable[[str], None], own: Line | None = None) -> Path:
    """Finds the checkpoint that ``resume`` names; ``auto``: the newest whole one of the run, and of its line ``own``.

    ``tell`` hears of newer ones that are not whole. Raises CheckpointError where there is none.
    """
    from paceline.checkpoint import find_checkpoint

    where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    return find_checkpoint(resume, where, config.checkpoint.verify, lambda passed: tell(str(passed)), own)


def how_to_continue(folder: Path) -> str:
    """Returns the words that say how to go on from the newest checkpoint, if there is one."""
    from paceline.checkpoint import list_checkpoints

    found = list_checkpoints(folder / "checkpoints")
    if not found:
        return ""
    command = shlex.join(["paceline", "train", str(folder / "config.yaml"), "--resume", "auto"])
    return f"to go on from step {int(found[-1].name.rpartition('-')[2])}:  {command}"


def _check_checkpoint_folder(where: str | None) -> None:
    """Raises UsageError or CheckpointError where ``checkpoint.folder`` cannot be written."""
    if where is None:
        return
    from paceline.checkpoint.storage import cannot_write, is_remote, storage_of

    if is_remote(where):
        storage_of(Path(where))  # says which package is missing
        return
    error = find_write_error(Path(where))
    if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):  # room may come: recovery.on_full_disk
        raise cannot_write(Path(where), error, name="checkpoint.folder")
