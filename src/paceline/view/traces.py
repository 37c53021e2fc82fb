"""The operations that ranks of a run wrote down one by one (``monitor.trace``), for the timeline.

``trace/rank-<r>.jsonl`` has an operation a line, with ``time``: the time of day at which it began. It is written when a
rank ends, so that a file is read once and kept while it stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from paceline.untrusted import file_inside, read_regular

_MOST_BYTES = 64 * 2**20  # of a file

Operation = tuple[float, float, str, int]  # start of day, seconds, kind, bytes


def operations_between(
    folder: Path, ranks: Mapping[int, float], start: float, end: float, most: int
) -> tuple[list[list[Any]], str]:
    """Returns [rank, start, seconds, kind, bytes] of operations in that time, since ``start``, and what is missing.

    ``ranks`` says by how much the clock of each is ahead of the one that ``start`` and ``end`` are read from.
    """
    trace = folder / "trace"
    if not trace.is_dir() or not trace.resolve().is_relative_to(folder.resolve()):
        return [], "set monitor.trace=true to have every collective here, too"
    found: list[list[Any]] = []
    notes = set()
    for rank, ahead_s in ranks.items():
        try:
            path = file_inside(trace, f"rank-{rank}.jsonl")
            operations = _read(path, path.stat().st_mtime_ns)
        except (OSError, ValueError) as error:
            notes.add(f"the trace of rank {rank} cannot be read: {getattr(error, 'strerror', None) or error}")
            continue
        for own_begin, seconds, kind, num_bytes in operations:
            begin = own_begin - ahead_s
            if begin < end and begin + seconds > start and len(found) < most:
                found.append([rank, round(begin - start, 7), round(seconds, 7), kind, num_bytes])
    if len(found) == most:
        notes.add(f"the first {most:,} operations are shown")
    return found, "; ".join(sorted(notes)[:2])


@lru_cache(maxsize=64)
def _read(path: Path, _changed: int) -> list[Operation]:
    """Returns the operations of a rank that have a time of day. Raises OSError, and ValueError for other lines."""
    lines = read_regular(path, _MOST_BYTES).splitlines()
    found: list[Operation] = []
    for each in from_json(b"[" + b",".join(line for line in lines if line.strip()) + b"]"):
        try:
            seconds = float(each["end_s"]) - float(each["start_s"])
            found.append((float(each["time"]), seconds, str(each["kind"])[:40], int(each["num_bytes"])))
        except (KeyError, TypeError, AttributeError):
            raise ValueError("it has operations without a time of day, as older versions wrote them") from None
    return found
