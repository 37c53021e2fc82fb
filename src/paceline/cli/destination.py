"""Files that commands write when they are done: looked at before they begin.

What takes minutes to measure must not be lost to a typo in the name of its file. Their options have
these functions as callbacks.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError

_PICTURES = (".png", ".svg", ".pdf")


def check_file(path: Path | None) -> Path | None:
    """Returns the path of a file to write into a folder that is there. Raises UsageError where it cannot be written."""
    from paceline.run.folder import find_write_error

    why = ""
    if path is None:
        return None
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"{path} cannot be written: there is no folder {path.parent}\n"
            "  what comes out is written there at the end\n  make the folder, or name a file in one that is there"
        )
    if path.is_dir():
        why = "it is a folder"
    elif path.exists():
        why = "" if os.access(path, os.W_OK) else "it is there, and may not be changed"
    elif error := find_write_error(path.parent):
        why = error.strerror or str(error)
    if why:
        raise _refusal(path, why)
    return path


def check_picture(path: Path | None) -> Path | None:
    """Returns the path of a picture. Raises UsageError for another ending than a picture has, and as a file's path."""
    if path is not None and path.suffix.lower() not in _PICTURES:
        raise UsageError(f"{path} is no picture\n  its name ends in {', '.join(_PICTURES)}\n  try {path.stem}.png")
    return check_file(path)


def check_page(path: Path | None) -> Path | None:
    """Returns the path of a page. Raises UsageError for another ending than .html, and as a file's path."""
    return _check_ending(path, ".html", "page")


def check_table(path: Path | None) -> Path | None:
    """Returns the path of a table. Raises UsageError for another ending than .csv, and as a file's path."""
    return _check_ending(path, ".csv", "table")


def _check_ending(path: Path | None, ending: str, what: str) -> Path | None:
    if path is not None and path.suffix.lower() != ending:
        raise UsageError(f"{path} is no {what}\n  its name ends in {ending}\n  try {path.stem}{ending}")
    return check_file(path)


def _refusal(path: Path, why: str) -> Exception:
    return UsageError(
        f"{path} cannot be written: {why}\n  what comes out is written there at the end\n"
        "  name a file in a folder that can be written"
    )
