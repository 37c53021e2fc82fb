"""Input that somebody else may have written: JSON within bounds, names that stay in their folder, files that are files.

Everything here raises ValueError or OSError with a sentence; who calls adds the file's name, the rule and the fix.

    JSON      at most so many bytes, 200 levels, integers of 100 digits, text that can be printed
    names     one part: no separator, no ``..``, and no link that leads out of the folder
    files     regular ones: a pipe, a device or a socket is refused before it is opened, so that nothing waits for it

Cost: about half of what ``json.loads`` takes by itself; a name takes one look at the disk.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, TypeGuard

MOST_JSON_BYTES = 2**28
MOST_LEVELS = 200
MOST_DIGITS = 100
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(code for code in range(256) if code not in b'[]{}"')
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def parse_json(text: str | bytes | bytearray, most_bytes: int = MOST_JSON_BYTES, most_levels: int = MOST_LEVELS) -> Any:
    """Reads JSON. Raises ValueError for what is no JSON, and for what is too long or nested too deeply."""
    if len(text) > most_bytes:
        raise ValueError(f"it has {len(text):,} bytes, and JSON is read up to {most_bytes:,}")
    shown = text if isinstance(text, str) else text.decode("utf-8")
    _check_levels(shown.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text), most_levels)
    try:
        value = json.loads(shown, parse_int=_integer)
        if "\\ud" in shown or "\\uD" in shown:  # half of a pair is no text: it cannot be printed or written
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    return value


def parse_json_object(text: str | bytes | bytearray, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError for anything else."""
    value = parse_json(text, most_bytes)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {kind_of(value)}, and not an object with names")
    return value


def reason_of(error: Exception) -> str:
    """Returns the first line of an error; of JSON in one line the column alone, as its caller knows the line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return str(error).partition("\n")[0]


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(text):,} digits, and {MOST_DIGITS} are the most")
    return int(text)


def _check_levels(text: bytes, most: int) -> None:
    """Raises ValueError for brackets within brackets beyond the bound: whoever walks the values calls itself so often.

    What is left of the text are its brackets outside of strings, and each round takes away the innermost pairs.
    """
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_BRACKETS, _OTHERS)
    rest = b"".join(marks.split(b'"')[::2])
    for _ in range(most):
        fewer = rest.replace(b"[]", b"")
        if len(fewer) == len(rest):
            return  # none are left, or they are no pairs, which is no JSON
        rest = fewer
    if b"[]" in rest:
        raise ValueError(f"it is nested more than {most} levels deep")


def kind_of(value: Any) -> str:
    """Returns what a value of JSON or YAML is, in words, however large it is."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "nothing" if value is None else f"a {type(value).__name__}")


def is_count(value: Any, most: int = 2**60) -> TypeGuard[int]:
    """Says whether a value is a whole number from 0 to ``most``."""
    return type(value) is int and 0 <= value <= most


def is_number(value: Any) -> TypeGuard[int | float]:
    """Says whether a value is a number that is finite."""
    return isinstance(value, int | float) and math.isfinite(value)


def plain_name(name: Any) -> str:
    """Returns the name of a file. Raises ValueError for a path: it might lead out of the folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or len(name) > 255 or not name.isprintable():
        shown = repr(name[:80]) if isinstance(name, str) else kind_of(name)
        raise ValueError(f"{shown} is no name of a file")
    if "/" in name or "\\" in name:
        raise ValueError(f"{name!r} leads out of the folder")
    return name


def file_inside(folder: Path, name: Any) -> Path:
    """Returns the path of a manifest's file. Raises ValueError for one outside, but for ``../../blobs``."""
    path = folder / plain_name(name)
    if path.is_symlink():
        home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
        allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
        if not any(target.is_relative_to(each) for each in allowed):
            raise ValueError(f"{name!r} is a link that leads out of the folder")
    return path


def open_regular(path: Path) -> io.FileIO:
    """Opens a regular file to be read, without waiting. Raises OSError for anything else."""
    _check_regular(os.stat(path), path)  # noqa: PTH116  some devices do things when they are opened
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "r")
    try:
        _check_regular(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Returns a whole regular file. Raises OSError for anything else, and for one of more than ``most_bytes``."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and is read up to {most_bytes:,}", str(path))
        parts = []
        while size > 0 and (part := file.read(size)):  # no more than it had: some files never end
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.ENOTSUP, f"it is {kind}, and not a file", str(path))
