"""What cannot be read or written, in three lines: what and why, the rule, and what to do about it. No torch."""

from __future__ import annotations

import errno
from pathlib import Path

from paceline.checkpoint.remote import storage_of, url_of
from paceline.checkpoint.storage import LocalFiles
from paceline.errors import CheckpointError

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
_WEIGHT_FOLDERS = (".metadata", "model.safetensors", "model.safetensors.index.json")
_FORBIDDEN = (errno.EACCES, errno.EPERM)

# What keeps a file from being written: the rule, and the way out.
_WRITING = {
    errno.ENOSPC: ("the disk is full", "free some space, or name another place"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or name another place"),
    errno.EFBIG: ("files may not grow that large here", "raise the limit (ulimit -f), or name another place"),
    errno.EROFS: ("the disk is read-only", "name another place"),
    errno.ENOTDIR: ("a file is where a folder is needed", "name another place"),
    errno.EEXIST: ("a file is where a folder is needed", "name another place"),
    errno.ENOENT: ("no folder can be made there", "name another place"),
}


def nothing_there(path: Path, fix: str) -> CheckpointError:
    """Returns the error of a place without checkpoints, with what is there instead; ``fix`` fits who asked."""
    where, rule = url_of(path), "a run saves into <run folder>/checkpoints/step-<number>"
    if not isinstance(storage_of(path), LocalFiles):
        return CheckpointError(f"no checkpoint in {where}\n  {rule}\n  {fix}")
    if _is_foreign(path):
        return CheckpointError(
            f"no checkpoint in {where}: it holds weights in another format\n  {rule}\n"
            f"  take them in first:  paceline checkpoint import {where} DST"
        )
    what = ": there is no such folder" if not path.exists() else ": it is a file" if path.is_file() else ""
    return CheckpointError(f"no checkpoint in {where}{what}\n  {rule}\n  {fix}")


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    """Returns the error of a file or folder that the system does not let anybody read."""
    where, why = url_of(Path(error.filename or path)), error.strerror or str(error)
    if error.errno in _FORBIDDEN:
        rule, fix = "all of a checkpoint must be readable", "give yourself the permission, or read it as its owner"
    elif error.errno == errno.ENOENT:
        rule, fix = "it is gone, or never was there", "check the path, or use another checkpoint"
    else:
        rule, fix = "its disk or the way to it failed", "look at the disk, or use another checkpoint"
    return CheckpointError(f"{where} cannot be read: {why}\n  {rule}\n  {fix}")


def cannot_write(path: Path, error: OSError, *, name: str = "") -> CheckpointError:
    """Returns the error of something that cannot be written; what was there before is as it was.

    ``name`` is the setting that it comes from, if any.
    """
    rule, fix = _WRITING.get(error.errno or 0, ("its disk or the way to it failed", "look at the disk"))
    if error.errno in _FORBIDDEN:
        rule, fix = "nobody but its owner may write there", "name another place, or give yourself the permission"
    what = f"{name} = {url_of(path)}" if name else url_of(path)
    return CheckpointError(f"cannot write {what}: {error.strerror or error}\n  {rule}\n  {fix}")


def _is_foreign(path: Path) -> bool:
    """Says whether there are weights that ``paceline checkpoint import`` takes in."""
    if path.is_file():
        return path.suffix in _WEIGHTS
    return any((path / name).is_file() for name in _WEIGHT_FOLDERS)
