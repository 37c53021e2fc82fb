"""A run's folder: made whole under its final name, or not at all, and never overwritten by accident.

runs/<name>/   config.yaml plan.json  records/  checkpoints/  logs/  tensorboard/
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from paceline.errors import RunFolderError

_PARTS = ("records", "checkpoints", "logs")


def prepare_folder(folder: Path, config_yaml: str, *, force: bool = False, resume: bool = False) -> Path:
    """Makes a run folder with its config. Raises RunFolderError if it exists and neither force nor resume was said.

    ``force`` replaces the old folder, at the last moment; ``resume`` keeps it and everything in it.
    """
    if resume and folder.is_dir():
        for part in _PARTS:
            (folder / part).mkdir(exist_ok=True)
        return folder
    if folder.exists() and not force:
        raise RunFolderError(
            f"the run folder {folder} exists already\n  a run never overwrites another\n"
            f"  choose another name (name=...), continue it with --resume auto, or replace it with --force"
        )
    if folder.exists() and not (folder / "config.yaml").is_file():
        raise RunFolderError(
            f"{folder} exists and is not a run folder: it has no config.yaml\n"
            "  --force replaces runs alone\n  choose another name (name=...) or remove it by hand"
        )
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for part in _PARTS:
            (partial / part).mkdir(parents=True)
        (partial / "config.yaml").write_text(config_yaml, encoding="utf-8")
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunFolderError(
            f"cannot make the run folder {folder}: {error}\n  set monitor.folder=... elsewhere"
        ) from error
    return folder
