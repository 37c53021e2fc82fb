"""What profiled ranks saw, as plain data that passes through files; all of them on one time line; and what it says.

The time line has the clock of rank 0:

time of a span             reading of its rank's clock - how far that is ahead - beginning of the first step
time of an event of torch  the same, by the anchor: an event of torch whose reading of the rank's clock is known

For each rank, over the profiled steps:

communication   from the start of an operation to the moment at which this rank was done waiting for it
exposed         on a CPU what the rank stood still for; on a GPU the time of kernels of collectives alone
hidden          communication - exposed
late rank       of what is exposed, the time until the last rank had come to the operation; the rest is the network
device idle     on a GPU, the time without a kernel
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypeGuard

from pydantic import TypeAdapter

from paceline.chrome_trace import TRACKS, Event, counter, name_process, name_track, span
from paceline.errors import UsageError
from paceline.schedule.clock import time_in_all
from paceline.units import format_bytes, format_seconds
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
        """Reads what ``asdict`` gave. Raises ValueError for anything else."""
        return TypeAdapter(cls).validate_python(values)

    def corrected(self, name: str) -> list[TraceSpan]:
        """Returns the spans of a track on the clock of rank 0."""
        spans, ahead = self.tracks.get(name, ()), self.ahead_s
        return [replace(each, start_s=each.start_s - ahead, end_s=each.end_s - ahead) for each in spans]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEvent(TraceSpan):
    """An event of torch's profiler on the clock of rank 0. ``row`` is its thread or stream."""

    category: str
    row: str

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
    tracks = [name for name in TRACKS if profile.spans.tracks.get(name)]
    yield from name_process(rank, f"rank {rank} ({profile.spans.device})", tracks)
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
            "dur": round(event.seconds * 1e6, 3),
        }
    for point in profile.memory:
        yield counter(rank, f"memory of {point.device}", point.at_s - zero_s, {"bytes": point.num_bytes})


def beside(events: Sequence[Event], path: Path) -> list[Event]:
    """Adds the processes of another trace file below those of ``events``, by its name. Raises UsageError for none."""
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


Interval = tuple[float, float]
_SHOWN, _POINTS = 10, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    rank: int
    steps_s: float
    communication_s: float
    exposed_s: float
    late_rank_s: float
    network_s: float
    data_s: float
    device_idle_s: float | None
    peak_bytes: int
    peak_phase: str

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.communication_s - self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """All ranks of a profile. ``memory`` has curves by rank, thinned out; ``clock_error_s`` is the worst rank's."""

    steps: int
    ranks: tuple[RankTimes, ...]
    operators: tuple[Operator, ...]
    kernels: tuple[Operator, ...]
    actions: Mapping[str, float]
    memory: Mapping[int, tuple[MemoryPoint, ...]]
    clock_error_s: float

    @property
    def step_s(self) -> float:
        return fmean(each.steps_s for each in self.ranks) / max(self.steps, 1)

    @property
    def idle(self) -> dict[str, float]:
        """The causes of idle time as shares of the steps, mean of the ranks, the largest first."""
        total = sum(each.steps_s for each in self.ranks) or 1.0
        causes = {
            "waiting for a late rank": sum(each.late_rank_s for each in self.ranks) / total,
            "waiting for the network": sum(each.network_s for each in self.ranks) / total,
            "waiting for data": sum(each.data_s for each in self.ranks) / total,
        }
        known = [each.device_idle_s for each in self.ranks if each.device_idle_s is not None]
        if known:
            causes["device without a kernel"] = sum(known) / total
        return dict(sorted(causes.items(), key=lambda each: -each[1]))

    def to_json(self) -> dict[str, Any]:
        ranks = [asdict(each) | {"hidden_s": each.hidden_s} for each in self.ranks]
        more = {"ranks": ranks, "step_s": self.step_s, "idle": self.idle}
        memory = {str(rank): [asdict(point) for point in points] for rank, points in self.memory.items()}
        return asdict(self) | more | {"memory": memory, "actions": dict(self.actions)}

    def lines(self) -> list[str]:
        error = f"clocks agree to within {format_seconds(self.clock_error_s)}"
        lines = [f"{self.steps} steps of {format_seconds(self.step_s)} on {len(self.ranks)} ranks; {error}", ""]
        lines.append(f"{'rank':<6}{'communication':>14}{'exposed':>11}{'hidden':>11}{'memory':>12}  peak in")
        for each in self.ranks:
            totals = (each.communication_s, each.exposed_s, each.hidden_s)
            way, exposed, hidden = (format_seconds(value / max(self.steps, 1)) for value in totals)
            memory = f"{format_bytes(each.peak_bytes):>12}  {each.peak_phase}"
            lines.append(f"{each.rank:<6}{way:>14}{exposed:>11}{hidden:>11}{memory}")
        lines += ["", "idle, of the step"]
        lines += [f"  {name:<26}{100 * share:>6.1f} %" for name, share in self.idle.items()]
        for title, rows in (("operators", self.operators), ("kernels", self.kernels)):
            if rows:
                lines += ["", f"{f'costliest {title}':<52}{'calls':>8}{'a step':>11}"]
                for row in rows[:_SHOWN]:
                    seconds = row.device_s if title == "kernels" else row.host_s
                    cost = format_seconds(seconds / max(self.steps * len(self.ranks), 1))
                    lines.append(f"  {row.name[:48]:<50}{row.calls:>8}{cost:>11}")
        if self.actions:
            means = ", ".join(f"{kind} {format_seconds(seconds)}" for kind, seconds in self.actions.items())
            lines += ["", f"actions of the schedule, mean: {means}"]
        return lines


def summarize_profile(ranks: Sequence[RankProfile]) -> ProfileSummary:
    late, zero_s = _late_intervals(ranks), begin_s(ranks)
    operators = (each for one in ranks for each in one.spans.operators)
    kernels = (each for one in ranks for each in one.events if each.is_device_work)
    actions: dict[str, list[float]] = defaultdict(list)
    for action in (action for one in ranks for action in one.spans.tracks.get("actions", ())):
        actions[action.name.rstrip("0123456789.")].append(action.seconds)
    return ProfileSummary(
        steps=max((len(each.spans.tracks.get("steps", ())) for each in ranks), default=0),
        ranks=tuple(_rank_times(each, late[each.spans.rank]) for each in ranks),
        operators=costliest((each.name, each.calls, each.host_s, 0.0) for each in operators),
        kernels=costliest((each.name, 1, 0.0, each.seconds) for each in kernels),
        actions={kind: fmean(seconds) for kind, seconds in sorted(actions.items())},
        memory={each.spans.rank: tuple(largest_by_time(each.memory, _POINTS, zero_s)) for each in ranks},
        clock_error_s=max((each.spans.clock_error_s for each in ranks), default=0.0),
    )


def costliest(rows: Iterable[tuple[str, int, float, float]]) -> tuple[Operator, ...]:
    """Adds up calls, seconds of the host and of the device by name; the fifty names that took longest."""
    found: dict[str, Operator] = {}
    for name, calls, host_s, device_s in rows:
        had = found.get(name) or Operator(name, 0, 0.0, 0.0)
        found[name] = Operator(name, had.calls + calls, had.host_s + host_s, had.device_s + device_s)
    return tuple(sorted(found.values(), key=lambda each: -(each.host_s + each.device_s))[:50])


def _rank_times(profile: RankProfile, late: Sequence[Interval]) -> RankTimes:
    spans = profile.spans
    steps = _intervals(spans.corrected("steps"))
    kernels = [each for each in profile.events if each.is_device_work]
    busy = _intervals(kernels)
    if busy:  # the device's own time
        ways = _intervals([each for each in kernels if "nccl" in each.name.lower()])
        compute = _intervals([each for each in kernels if "nccl" not in each.name.lower()])
        communication_s = time_in_all(ways)
        exposed_s = communication_s - time_in_all(ways, compute)
        late_s = min(exposed_s, time_in_all(ways, late))
    else:
        ways, waits = _intervals(spans.corrected("collectives")), _intervals(spans.corrected("waits"))
        communication_s, exposed_s = time_in_all([*ways, *waits], steps), time_in_all(waits, steps)
        late_s = min(exposed_s, time_in_all(waits, late))
    peak = max(profile.memory, key=lambda each: each.num_bytes, default=None)
    phases = [] if peak is None else [p.name for p in spans.corrected("phases") if p.start_s <= peak.at_s <= p.end_s]
    return RankTimes(
        rank=spans.rank,
        steps_s=time_in_all(steps),
        communication_s=communication_s,
        exposed_s=exposed_s,
        late_rank_s=late_s,
        network_s=max(0.0, exposed_s - late_s),
        data_s=sum(each.seconds for each in spans.tracks.get("phases", ()) if each.name == "data"),
        device_idle_s=time_in_all(steps) - time_in_all(steps, busy) if busy else None,
        peak_bytes=0 if peak is None else peak.num_bytes,
        peak_phase=phases[0] if phases else "",
    )


def _late_intervals(ranks: Sequence[RankProfile]) -> dict[int, list[Interval]]:
    """Returns, by rank, the times between its coming to a collective and that of the last rank of the group."""
    arrivals: dict[tuple[str, tuple[int, ...], int], dict[int, TraceSpan]] = defaultdict(dict)
    for each in ranks:
        counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for operation in each.spans.corrected("collectives"):
            key = (operation.name, operation.ranks)
            arrivals[(*key, counts[key])][each.spans.rank] = operation
            counts[key] += 1
    found: dict[int, list[Interval]] = {each.spans.rank: [] for each in ranks}
    for (kind, group, _), there in arrivals.items():
        if kind not in ("send", "recv") and len(there) == len(group):
            last_s = max(operation.start_s for operation in there.values())
            for rank, operation in there.items():
                found[rank].append((operation.start_s, last_s))
    return found


def _intervals(spans: Sequence[TraceSpan]) -> list[Interval]:
    return [(each.start_s, each.end_s) for each in spans]
