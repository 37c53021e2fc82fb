"""What the folder of a run has beside its records: config and logs as text, how a rank failed, tags and a note.

Only regular files inside the folder are read, and of a long one the end. ``glance`` says where a run stands, by the
first line and the end of rank 0's records: for lists of runs that nobody has chosen.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from yaml import YAMLError

from paceline.bounded_yaml import load_yaml
from paceline.config.load import dotted_values
from paceline.errors import PacelineError
from paceline.records.records import STEPS, parse_line
from paceline.untrusted import file_inside, is_number, open_regular, parse_json_object, read_regular

_MOST_CONFIG_BYTES = 2**20
_MOST_TEXT_BYTES = 2**18
_MOST_LOGS = 4096  # ranks
_TAIL_BYTES = 2**16
_NOTE, _NOTE_CHARACTERS = "note.json", {"tags": 200, "note": 2000}
_LOG = re.compile(r"run|rank-\d{1,7}", re.ASCII)
_SILENT_S = 30.0  # a run that nobody has chosen, and that wrote nothing for so long, does not run
_STARTED = ("strategy", "world_size", "global_batch")


def text_names(folder: Path) -> list[str]:
    """Returns the names of what ``text_of`` reads: config, log of the run, logs of its ranks in their order."""
    found = ["config"] if (folder / "config.yaml").is_file() else []
    with suppress(OSError):
        logs = [path.stem for path in (folder / "logs").glob("*.log") if _LOG.fullmatch(path.stem)]
        found += sorted(logs, key=lambda name: (name != "run", len(name), name))[:_MOST_LOGS]
    return found


def text_of(folder: Path, name: str, most_bytes: int = _MOST_TEXT_BYTES) -> dict[str, Any]:
    """Returns the end of a text of the run, in whole lines. Raises KeyError where there is none of that name."""
    if name != "config" and not _LOG.fullmatch(name):
        raise KeyError(name)
    try:
        place, file = (folder, "config.yaml") if name == "config" else (file_inside(folder, "logs"), f"{name}.log")
        content, size = _end_of(file_inside(place, file), most_bytes)
    except (OSError, ValueError) as error:
        raise KeyError(name) from error
    if len(content) < size:
        content = content.partition(b"\n")[2] or content
    return {"text": content.decode("utf-8", "replace"), "bytes": size, "is_cut": len(content) < size}


def failure_of(folder: Path) -> dict[str, Any] | None:
    """Returns rank, message and traceback of the rank that failed first of itself; None where no rank has told."""
    found = []
    with suppress(OSError, ValueError):
        for path in sorted(file_inside(folder, "logs").glob("rank-*.error.json"))[:_MOST_LOGS]:
            with suppress(OSError, ValueError):
                found.append(parse_json_object(read_regular(file_inside(path.parent, path.name), _MOST_TEXT_BYTES)))
    told = [each for each in found if isinstance(each.get("rank"), int) and is_number(each.get("time"))]
    if not told:
        return None
    first = min(told, key=lambda each: (each.get("kind") == "lost", each["time"]))  # others lost their connection to it
    return {"rank": first["rank"]} | {name: str(first.get(name) or "")[:20_000] for name in ("message", "traceback")}


def config_of(folder: Path) -> dict[str, str]:
    """Returns the settings of a run by dotted name; nothing where there is no config that can be read."""
    path = folder / "config.yaml"
    try:
        return {} if path.is_symlink() else _config(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, YAMLError, PacelineError):
        return {}


@lru_cache(maxsize=1024)
def _config(path: Path, _changed: int) -> dict[str, str]:
    found = load_yaml(read_regular(path, _MOST_CONFIG_BYTES).decode("utf-8"))
    values = dotted_values(found) if isinstance(found, dict) else {}
    return {name: "" if value is None else str(value)[:300] for name, value in values.items()}


def note_of(folder: Path) -> dict[str, str]:
    """Returns the tags and the note that somebody has given to a run."""
    try:
        return parse_note(read_regular(file_inside(folder, _NOTE), _TAIL_BYTES))
    except (OSError, ValueError):
        return dict.fromkeys(_NOTE_CHARACTERS, "")


def parse_note(content: bytes) -> dict[str, str]:
    """Reads tags and note of a JSON object. Raises ValueError for other values."""
    given = parse_json_object(content, _TAIL_BYTES)
    for name, most in _NOTE_CHARACTERS.items():
        if not isinstance(given.get(name), str) or len(given[name]) > most:
            raise ValueError(f"{name} is a text of at most {most:,} characters")
    return {name: given[name] for name in _NOTE_CHARACTERS}


def keep_note(folder: Path, note: dict[str, str]) -> None:
    """Keeps tags and note in the folder. Raises OSError if it cannot."""
    partial = folder / f".{_NOTE}.{secrets.token_hex(4)}"
    try:
        partial.write_bytes(to_json(note))
        partial.replace(folder / _NOTE)  # a link of that name is replaced, and not followed
    finally:
        partial.unlink(missing_ok=True)


def row_of(folder: Path) -> dict[str, Any]:
    """Returns what the table of all runs shows of one."""
    config = config_of(folder)
    return glance(folder) | {"lr": config.get("optim.lr") or config.get("optimizer.lr", "")} | note_of(folder)


def glance(folder: Path) -> dict[str, Any]:
    """Returns the state of a run that has not been read: by the ends of rank 0's file, and whether files grow."""
    records = folder / "records"
    try:
        path = file_inside(records, "rank-0.jsonl")
        status = path.stat()
        found = _ends(path, (status.st_mtime_ns, status.st_size))
        written_at = max(path.lstat().st_mtime for path in (path, *records.glob("host-*.jsonl")))
    except (OSError, ValueError, TypeError, OverflowError):
        return {"status": "starting", "step": 0, "sentence": ""}
    known = found["status"] or ("running" if time.time() - written_at < _SILENT_S else "unfinished")
    return found | {"status": known, "sentence": f"{known}, step {found['step']:,}"}


@lru_cache(maxsize=4096)
def _ends(path: Path, _changed: tuple[int, int]) -> dict[str, Any]:
    """Returns what the first line and the last 64 KiB of a file of records say."""
    with open_regular(path) as file:
        first = parse_json_object((file.read(_TAIL_BYTES) or b"").partition(b"\n")[0])
    lines = _end_of(path, _TAIL_BYTES)[0].rstrip().split(b"\n")
    last = parse_json_object(lines[-1])
    ended = last.get("status") if last.get("type") == "end" else None
    found: dict[str, Any] = {name: first.get(name) for name in _STARTED if isinstance(first.get(name), str | int)}
    found |= {"status": ended if ended in ("done", "failed", "stopped") else "", "step": int(last.get("step", 0))}
    if is_number(first.get("time")) and is_number(last.get("time")):
        found |= {"started": first["time"], "seconds": max(0.0, last["time"] - first["time"])}
    for marks, prefix in ((STEPS, ""), (b'{"type":"eval"', "eval_")):
        line = next((each for each in reversed(lines) if each.startswith(marks)), None)
        with suppress(ValueError):
            record = None if line is None else parse_line(line)
            found |= {f"{prefix}{name}": getattr(record, name, None) for name in ("loss", "accuracy")}
    return found


def _end_of(path: Path, most_bytes: int) -> tuple[bytes, int]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most_bytes))
        return file.read(most_bytes) or b"", size
