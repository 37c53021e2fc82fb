"""A copy of the best checkpoint, under a name of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from paceline.checkpoint.storage import LocalFiles, put_in_place
from paceline.errors import CheckpointError


def copy_checkpoint(path: Path, name: str) -> Path:
    """Copies a checkpoint to ``name`` beside it, which retention leaves alone; files are shared where they can be.

    A kill leaves the older copy, between the two renames under the name ``.<name>.old``.
    """
    final, partial, files = path.parent / name, path.parent / f".{name}.new", LocalFiles()
    try:
        files.remove(partial)
        shutil.copytree(path, partial, copy_function=_link)
        put_in_place(files, partial, final)
    except OSError as error:  # shutil.Error is one
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot copy {path} to {final}: {error}\n  {path} itself is complete") from error
    return final


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target
