"""What profiled ranks saw, as plain data that passes through files; and all of them on one time line.

The time line has the clock of rank 0:

time of a span             reading of its rank's clock - how far that is ahead - beginning of the first step
time of an event of torch  the same, by the anchor: an event of torch whose reading of the rank's clock is known
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TypeGuard

from paceline.chrome_trace import TRACKS, Event, counter, name_process, name_track, name_tracks, span
from paceline.errors import UsageError
from paceline.untrusted import parse_json, read_regular

ANCHOR = "paceline.anchor"  # the event of torch by which its clock and ours are compared
_FIRST_OF_TORCH = 10  # the track number after our own
_MOST_BYTES = 2**30
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that lasted, in seconds of its rank's clock. Collectives have bytes, and the ranks of their group."""

    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of torch: its calls, and the time of its own without that of operators inside it."""

    name: str
    calls: int
    host_s: float
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """All of one rank. Its clock is ``ahead_s`` before that of rank 0, and read ``anchor_s`` at the anchor event."""

    rank: int
    device: str
    ahead_s: float
    clock_error_s: float
    anchor_s: float
    tracks: Mapping[str, list[TraceSpan]] = field(default_factory=dict)
    operators: tuple[Operator, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Reads what ``asdict`` gave."""
        tracks = {
            name: [TraceSpan(**{**each, "ranks": tuple(each["ranks"])}) for each in spans]
            for name, spans in values["tracks"].items()
        }
        operators = tuple(Operator(**each) for each in values["operators"])
        return cls(**{**values, "tracks": tracks, "operators": operators})

    def corrected(self, name: str) -> list[TraceSpan]:
        """Returns the spans of a track on the clock of rank 0."""
        spans, ahead = self.tracks.get(name, ()), self.ahead_s
        return [replace(each, start_s=each.start_s - ahead, end_s=each.end_s - ahead) for each in spans]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEvent:
    """An event of torch's profiler on the clock of rank 0, in seconds. ``row`` is its thread or stream."""

    name: str
    category: str
    row: str
    start_s: float
    end_s: float

    @property
    def is_device_work(self) -> bool:
        return self.category in _DEVICE_WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The bytes that torch's allocators held at one time, by device (``CPU``, ``CUDA 0``)."""

    at_s: float
    device: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """One rank on the clock of rank 0: its own spans, torch's events, and memory over time."""

    spans: RankSpans
    events: tuple[TorchEvent, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()


def place_rank(spans: RankSpans, trace: Mapping[str, Any]) -> RankProfile:
    """Moves the events of a rank's torch trace onto the clock of rank 0. Raises ValueError without the anchor."""
    found = trace.get("traceEvents", [])
    anchor_us = next((float(each["ts"]) for each in found if each.get("name") == ANCHOR and "ts" in each), None)
    if anchor_us is None:
        raise ValueError(f"the trace of rank {spans.rank} has no event {ANCHOR}")
    threads = (each for each in found if each.get("name") == "thread_name")
    rows = {(each["pid"], each["tid"]): str(each["args"]["name"]) for each in threads}

    def at_s(microseconds: float) -> float:
        return (microseconds - anchor_us) / 1e6 + spans.anchor_s - spans.ahead_s

    events = [
        TorchEvent(
            name=str(each["name"]),
            category=str(each.get("cat", "")),
            row=rows.get((each.get("pid"), each.get("tid")), f"thread {each.get('tid')}"),
            start_s=at_s(float(each["ts"])),
            end_s=at_s(float(each["ts"]) + float(each.get("dur", 0.0))),
        )
        for each in found
        if each.get("ph") == "X"
        and each.get("cat") not in (None, "Trace", "python_function")
        and each["name"] != ANCHOR
    ]
    memory = []
    for each in (each for each in found if each.get("name") == "[memory]"):
        args = each["args"]
        device = "CPU" if int(args.get("Device Type", 0)) == 0 else f"CUDA {args.get('Device Id', 0)}"
        size = int(args.get("Total Allocated", 0))
        memory.append(MemoryPoint(at_s=at_s(float(each["ts"])), device=device, num_bytes=size))
    return RankProfile(spans=spans, events=tuple(events), memory=tuple(sorted(memory, key=lambda each: each.at_s)))


def merged_events(ranks: Sequence[RankProfile]) -> list[Event]:
    """Returns the events of all ranks, one process each; time begins with the first step of the earliest rank."""
    zero_s = begin_s(ranks)
    return [event for each in ranks for event in _rank_events(each, zero_s)]


def begin_s(ranks: Sequence[RankProfile]) -> float:
    """Returns when the first profiled step of the earliest rank began, on the clock of rank 0."""
    return min((each.start_s for one in ranks for each in one.spans.corrected("steps")), default=0.0)


def _rank_events(profile: RankProfile, zero_s: float) -> Iterator[Event]:
    rank = profile.spans.rank
    yield from name_process(rank, f"rank {rank} ({profile.spans.device})")
    yield from name_tracks(rank, [name for name in TRACKS if profile.spans.tracks.get(name)])
    for track in TRACKS:
        for each in profile.spans.corrected(track):
            more = {"bytes": each.num_bytes, "ranks": list(each.ranks)} if track == "collectives" else None
            yield span(rank, track, each.name, each.start_s - zero_s, each.end_s - zero_s, more)
    rows = list(dict.fromkeys(each.row for each in profile.events))
    for number, row in enumerate(rows):
        yield name_track(rank, _FIRST_OF_TORCH + number, row)
    for event in profile.events:
        yield {
            "ph": "X",
            "name": event.name,
            "cat": event.category,
            "pid": rank,
            "tid": _FIRST_OF_TORCH + rows.index(event.row),
            "ts": round((event.start_s - zero_s) * 1e6, 3),
            "dur": round((event.end_s - event.start_s) * 1e6, 3),
        }
    for point in profile.memory:
        yield counter(rank, f"memory of {point.device}", point.at_s - zero_s, {"bytes": point.num_bytes})


def beside(events: Sequence[Event], path: Path) -> list[Event]:
    """Adds the processes of another trace file below those of ``events``, under the name of the file.

    Raises UsageError for a file that is no trace.
    """
    try:
        data = read_regular(path, _MOST_BYTES)
        if path.suffix == ".gz":  # no more than is read below: a small file may hold a large one
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_MOST_BYTES + 1)
        values = parse_json(data, _MOST_BYTES)
        others = values["traceEvents"] if isinstance(values, dict) else values
        if not isinstance(others, list) or not all(_is_event(each) for each in others):
            raise ValueError("it has no list of events")
    except (OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        raise UsageError(
            f"--beside {path}: {error}\n  it is a trace of paceline profile, simulate or predict\n"
            "  write one with: paceline simulate CONFIG --trace simulated.json"
        ) from error
    first = 1 + max((each["pid"] for each in events), default=-1)
    known = sorted({each.get("pid", 0) for each in others}, key=str)
    moved = [each | {"pid": first + known.index(each.get("pid", 0))} for each in others]
    for each in moved:
        if each.get("name") == "process_sort_index":
            each["args"] = {"sort_index": each["pid"]}
        elif each.get("name") == "process_name":
            each["args"] = {"name": f"{path.name}: {each.get('args', {}).get('name', '')}"}
    return [*events, *moved]


def _is_event(value: Any) -> TypeGuard[Event]:
    """Says whether a value of JSON is an event whose process and arguments can be read."""
    if not isinstance(value, dict) or not isinstance(value.get("args", {}), dict):
        return False
    return isinstance(value.get("pid", 0), int | float | str)


def largest_by_time(points: Sequence[MemoryPoint], most: int, zero_s: float) -> Iterator[MemoryPoint]:
    """Thins a curve out to about ``most`` points, the largest of each equal part of the time; this begins at zero."""
    kept = points
    if len(points) > most:
        start_s, length_s = points[0].at_s, max(points[-1].at_s - points[0].at_s, 1e-9)
        groups = groupby(points, key=lambda each: min(int((each.at_s - start_s) / length_s * most), most - 1))
        kept = [max(own, key=lambda each: each.num_bytes) for _, own in groups]
    return (replace(point, at_s=point.at_s - zero_s) for point in kept)
