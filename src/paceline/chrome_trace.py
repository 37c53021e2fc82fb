"""Time lines in the trace event format: one process a rank, the same tracks for measured and predicted runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

TRACKS = {"steps": 0, "phases": 1, "actions": 2, "waits": 3, "collectives": 4}
"""The rows of a rank, from the top; threads and streams of torch's profiler follow."""

Event = dict[str, Any]


def name_process(process: int, name: str, tracks: Iterable[str] = ()) -> list[Event]:
    """Names a rank and those of the usual rows that it has, and keeps processes in the order of their numbers."""
    about = {"process_name": {"name": name}, "process_sort_index": {"sort_index": process}}
    events = [{"ph": "M", "name": key, "pid": process, "tid": 0, "args": value} for key, value in about.items()]
    return events + [name_track(process, TRACKS[track], track) for track in tracks]


def name_track(process: int, track: int, name: str) -> Event:
    """Names a row of a rank."""
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}


def span(process: int, track: str, name: str, start_s: float, end_s: float, more: Event | None = None) -> Event:
    """Makes an event that lasts; times count in seconds from the beginning of the time line."""
    event: Event = {"ph": "X", "name": name, "cat": track, "pid": process, "tid": TRACKS[track]}
    event |= {"ts": round(start_s * 1e6, 3), "dur": round((end_s - start_s) * 1e6, 3)}
    return event | ({"args": dict(more)} if more else {})


def counter(process: int, name: str, at_s: float, values: Mapping[str, float]) -> Event:
    """Makes a point of a curve below a rank."""
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": round(at_s * 1e6, 3), "args": dict(values)}


def write_events(path: Path, events: Sequence[Event], about: Mapping[str, Any] | None = None) -> None:
    """Writes a trace, compressed where the name ends in ``.gz``. Raises UsageError if it cannot be written."""
    payload = {"traceEvents": list(events), "displayTimeUnit": "ms"} | ({"otherData": dict(about)} if about else {})
    text = json.dumps(payload, separators=(",", ":")).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        why = f"cannot write the trace {path}: {error.strerror or error}"
        raise UsageError(f"{why}\n  give a file in a folder that can be written") from error
