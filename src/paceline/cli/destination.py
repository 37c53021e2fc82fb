"""Files that commands write when they are done: looked at before they begin.

What takes minutes to measure must not be lost to a typo in the name of its file. Their options have
these functions as callbacks.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError


def check_file(path: Path | None) -> Path | None:
    """Returns the path of a file to write into a folder that is there. Raises UsageError where it cannot be written."""
    from paceline.run.folder import find_write_error

    if path is None:
        return None
    why, fix = "", "name a file in a folder that can be written"
    if not path.absolute().parent.is_dir():
        why, fix = f"there is no folder {path.parent}", "make the folder, or name a file in one that is there"
    elif path.is_dir():
        why = "it is a folder"
    elif path.exists():
        why = "" if os.access(path, os.W_OK) else "it is there, and may not be changed"
    elif error := find_write_error(path.parent):
        why = error.strerror or str(error)
    if why:
        raise UsageError(f"{path} cannot be written: {why}\n  what comes out is written there at the end\n  {fix}")
    return path


def check_picture(path: Path | None) -> Path | None:
    """Returns the path of a picture. Raises UsageError for another ending than a picture has, and as a file's path."""
    return _check_ending(path, "picture", ".png", ".svg", ".pdf")


def check_page(path: Path | None) -> Path | None:
    """Returns the path of a page. Raises UsageError for another ending than .html, and as a file's path."""
    return _check_ending(path, "page", ".html")


def check_table(path: Path | None) -> Path | None:
    """Returns the path of a table. Raises UsageError for another ending than .csv, and as a file's path."""
    return _check_ending(path, "table", ".csv")


def _check_ending(path: Path | None, what: str, *endings: str) -> Path | None:
    if path is not None and path.suffix.lower() not in endings:
        rule = f"its name ends in {', '.join(endings)}"
        raise UsageError(f"{path} is no {what}\n  {rule}\n  try {path.stem}{endings[0]}")
    return check_file(path)
