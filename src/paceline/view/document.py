"""What the page draws, as plain values: curves in buckets, events, the map of ranks, the timeline.

    describe(run, window)   one run: {"state", "facts", "x", "curves", "evaluations", "events", "hosts", ...}
    heat(run, name, window) {"ranks", "steps", "values"}: base64 of little-endian float32, row by row (or by expert)
    timeline(run, steps)    {"steps", "ranks", "end", "phases", "operations"}: seconds since the first of them

Curves have at most ``Window.points`` buckets, each with its mean, and the least and greatest of several steps.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic_core import from_json

from paceline.records.console import scores_text
from paceline.records.event_words import event_name, event_text
from paceline.records.records import CommRecord, EvalRecord, EventRecord, HostRecord
from paceline.records.samples import MOST_SAMPLES
from paceline.records.summary import PHASES, loads_by_layer
from paceline.search.expectation import read_expectation
from paceline.units import format_seconds
from paceline.untrusted import file_inside, is_number, read_regular
from paceline.view.columns import HEAT, Array, bucket_starts, extremes, means
from paceline.view.folder import failure_of, text_names
from paceline.view.runs import QUIET_EVENTS, ShownRun

_MOST_EVENTS = 200  # of a kind
_MOST_STEPS = 24  # of a timeline
_MOST_OPERATIONS = 20_000
_MOST_TRACE_BYTES = 64 * 2**20
_FIRST_SETTINGS = {"lr": 0, "global_batch": 1, "microbatch": 1, "accumulate": 1, "strategy": 2, "ranks": 2}
_SEEN_LATE = 0.05  # of a step
_Key = TypeVar("_Key", bound=Hashable)
_Valued = tuple[_Key, EvalRecord | EventRecord | CommRecord, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which steps to show, and in how many buckets at most."""

    first: float = -math.inf
    last: float = math.inf
    points: int = 1000


def describe(run: ShownRun, window: Window | None = None) -> dict[str, Any]:
    """Returns all that the page shows of a run but for its map, timeline and words."""
    window = window or Window()
    curves, steps = run.columns.curves(), run.columns.steps
    span = _span(steps, window)
    numbers, times = steps[span], curves["time"][span]
    starts = bucket_starts(len(numbers), window.points)
    units = 1.0 if run.lead is None else run.lead.units_per_sample
    shown = {name: values[span] for name, values in curves.items() if name not in ("time", "epoch")}
    shown["units_per_s"] = shown.pop("samples_per_s") * units
    told = {"id": run.id, "name": run.name, "folder": str(run.folder), "version": run.version, "read": run.share_read}
    told |= {"state": asdict(run.state()), "verdict": run.verdict(), "problems": run.problems(), "facts": _facts(run)}
    told |= {
        "range": [float(steps[0]), float(steps[-1])] if len(steps) else None,
        "bucketed": len(starts) < len(numbers),
        "x": {"step": rounded(means(numbers, starts), 9), "time": rounded(means(times - run.first_time, starts))},
        "curves": {name: _curve(values, starts) for name, values in shown.items() if np.isfinite(values).any()},
        "evaluations": _points(run, _evaluated(run)),
        "failure": failure_of(run.folder) if run.state().status in ("failed", "died") else None,
    }
    told |= {"events": _events(run), "own": _points(run, _own_scalars(run)), "hosts": _hosts(run, window.points)}
    told |= {"comm": _comm(run), "predicted": _predicted(run), "heat_names": _heat_names(run)}
    told |= {"expert_layers": list(loads_by_layer(run.experts)), "texts": text_names(run.folder)}
    return told | {"samples": _samples(run)}


def heat(run: ShownRun, name: str, window: Window) -> dict[str, Any]:
    """Returns the map of one field, or of the experts of a layer. Raises KeyError for a name that there is none of."""
    if name not in HEAT:
        return _packed(name, *_loads(run, name, window))
    ranks, steps, values = run.columns.heat(name, _span(run.columns.steps, window), window.points)
    known = values[np.isfinite(values)]
    low, high = np.percentile(known, (2, 98)) if known.size else (0.0, 0.0)
    if name == "late_s" and known.size:  # what is far below a step is not worth a colour
        room = _SEEN_LATE * float(np.nanmedian(run.columns.curves()["step_s"]))
        low, high = min(low, -room), max(high, room)
    return _packed(name, ranks, steps, values, (low, high))


def _loads(run: ShownRun, layer: str, window: Window) -> tuple[list[int], Array, Array, tuple[float, float]]:
    """Returns experts, steps, loads over the fair share by expert and step, and between what they are coloured."""
    records = loads_by_layer(run.experts)[layer]
    shown = [each for each in records if window.first <= each.step <= window.last] or records[-1:]
    starts = bucket_starts(len(shown), window.points)
    loads = np.array([each.loads for each in shown], dtype=np.float64).T
    steps = means(np.array([each.step for each in shown], dtype=np.float64), starts)
    return list(range(len(loads))), steps, means(loads, starts), (0.0, max(2.0, float(np.percentile(loads, 98))))


def _packed(name: str, rows: list[int], steps: Array, values: Array, limits: tuple[float, float]) -> dict[str, Any]:
    packed = base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()
    about = {"name": name, "ranks": rows, "steps": rounded(steps, 9)}
    return about | {"values": packed, "limits": rounded(np.array(limits))}


def timeline(run: ShownRun, first: float, last: float, most: int = _MOST_STEPS) -> dict[str, Any]:
    """Returns when each rank did what in some steps; where they are too many, in the last of them."""
    span = _span(run.columns.steps, Window(first=first, last=last))
    span = slice(max(span.start, span.stop - most), span.stop)
    ranks, numbers, ends, fields = run.columns.step_of(span)
    ahead_s = np.array([run.clocks.get(rank, 0.0) for rank in ranks])
    ends = ends - ahead_s[:, None]
    starts = ends - fields[0]
    zero = float(np.nanmin(starts)) if np.isfinite(starts).any() else 0.0
    until = float(np.nanmax(ends)) if np.isfinite(ends).any() else 0.0
    clocks = dict(zip(ranks, ahead_s.tolist(), strict=True))
    found, note = _operations_in(run.folder, clocks, zero, until)
    return {
        "steps": [int(number) for number in numbers],
        "ranks": ranks,
        "phases": list(PHASES),
        "end": [rounded(row - zero, 6) for row in ends],
        "length": [rounded(row) for row in fields[0]],
        "parts": [[rounded(row) for row in part] for part in fields[1:]],
        "operations": found,
        "note": "; ".join(filter(None, (_clock_note(run, ranks), note))),
    }


def _operations_in(folder: Path, ranks: Mapping[int, float], start: float, end: float) -> tuple[list[list[Any]], str]:
    """Returns [rank, start, seconds, kind, bytes] on clocks that are ahead by ``ranks``, and what is missing."""
    trace = folder / "trace"
    if not trace.is_dir() or not trace.resolve().is_relative_to(folder.resolve()):
        return [], "set monitor.trace=true to have every collective here, too"
    found, notes = list[list[Any]](), set[str]()
    for rank, ahead_s in ranks.items():
        try:
            path = file_inside(trace, f"rank-{rank}.jsonl")
            operations = _operations(path, path.stat().st_mtime_ns)
        except (OSError, ValueError) as error:
            notes.add(f"the trace of rank {rank} cannot be read: {getattr(error, 'strerror', None) or error}")
            continue
        for own_begin, seconds, kind, num_bytes in operations:
            begin = own_begin - ahead_s
            if begin < end and begin + seconds > start and len(found) < _MOST_OPERATIONS:
                found.append([rank, round(begin - start, 7), round(seconds, 7), kind, num_bytes])
    if len(found) == _MOST_OPERATIONS:
        notes.add(f"the first {_MOST_OPERATIONS:,} operations are shown")
    return found, "; ".join(sorted(notes)[:2])


@lru_cache(maxsize=64)
def _operations(path: Path, _changed: int) -> list[tuple[float, float, str, int]]:
    """Returns start of day, seconds, kind and bytes of a rank's operations. Raises OSError or ValueError."""
    lines = read_regular(path, _MOST_TRACE_BYTES).splitlines()
    found = []
    for each in from_json(b"[" + b",".join(line for line in lines if line.strip()) + b"]"):
        try:
            seconds = float(each["end_s"]) - float(each["start_s"])
            found.append((float(each["time"]), seconds, str(each["kind"])[:40], int(each["num_bytes"])))
        except (KeyError, TypeError, AttributeError):
            raise ValueError("it has operations without a time of day, as older versions wrote them") from None
    return found


def _clock_note(run: ShownRun, ranks: Sequence[int]) -> str:
    if len({run.starts[rank].host for rank in ranks if rank in run.starts}) < 2 and not run.clocks:
        return ""
    if not all(rank in run.clocks for rank in ranks):
        return "clocks of the hosts were not compared: rows may be off by what they differ"
    most = max((abs(run.clocks[rank]) for rank in ranks), default=0.0)
    return f"clocks of the hosts differ by up to {format_seconds(most)}, and are corrected"


def differences(configs: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Returns the settings in which runs differ, the most important first; a run without a config differs in none."""
    names = sorted({name for each in configs for name in each}, key=_weight)
    rows = [(name, [each.get(name, "") for each in configs]) for name in names]
    known = [bool(each) for each in configs]
    return [(name, values) for name, values in rows if len(set(compress(values, known))) > 1]


def _weight(name: str) -> tuple[int, str]:
    """Sorts settings: those that decide on the result come first, names of runs last."""
    return (_FIRST_SETTINGS.get(name.rpartition(".")[2], len(_FIRST_SETTINGS)) + (name == "name"), name)


def rounded(values: Array, digits: int = 5) -> list[float]:
    """Returns numbers with so many significant digits; what is not finite stays so, and is written as null."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        size = np.where((values != 0) & np.isfinite(values), np.floor(np.log10(np.abs(values))), 0)
        places = digits - 1 - size
        factor = 10.0 ** np.abs(places)
        short = np.where(places >= 0, np.round(values * factor) / factor, np.round(values / factor) * factor)
    found: list[float] = np.where(np.isfinite(short), short, values).tolist()
    return found


def _span(steps: Array, window: Window) -> slice:
    return slice(int(np.searchsorted(steps, window.first)), int(np.searchsorted(steps, window.last, side="right")))


def _curve(values: Array, starts: Array) -> dict[str, list[float]]:
    if len(starts) == values.shape[-1]:
        return {"mean": rounded(values)}
    low, high = extremes(values, starts)
    return {"mean": rounded(means(values, starts)), "min": rounded(low), "max": rounded(high)}


def _facts(run: ShownRun) -> dict[str, Any]:
    lead = run.lead
    if lead is None:
        return {}
    names = ("strategy", "backend", "world_size", "num_parameters", "global_batch", "microbatch", "accumulate")
    facts = {name: getattr(lead, name) for name in (*names, "unit", "torch", "python", "paceline", "compute")}
    hosts = sorted({start.host for start in run.starts.values()})
    return facts | {"device": lead.device, "hosts": hosts[:16], "num_hosts": len(hosts), "started": run.first_time}


def _points(run: ShownRun, values: Iterable[_Valued[_Key]]) -> dict[_Key, list[list[float]]]:
    """Returns points of curves by key: step, time and values of each record."""
    found: dict[_Key, list[list[float]]] = {}
    for key, record, numbers in values:
        found.setdefault(key, []).append([record.step, round(record.time - run.first_time, 3), *numbers])
    return found


def _evaluated(run: ShownRun) -> Iterator[_Valued[str]]:
    for each in run.evaluations:
        yield from ((name, each, [value]) for name, value in each.scores.items() if math.isfinite(value))


def _own_scalars(run: ShownRun) -> Iterator[_Valued[str]]:
    for each in run.scalars:
        yield from ((str(name), each, [value]) for name, value in each.detail.items() if is_number(value))


def _events(run: ShownRun) -> list[dict[str, Any]]:
    """Returns the events and evaluations that are marks on charts, in order; of a frequent kind, the last."""
    steps, times = run.columns.steps, run.columns.curves()["time"]
    is_rising = bool(np.all(np.diff(times) >= 0))
    kinds: dict[str, list[dict[str, Any]]] = {}
    scored = ((scores_text(each), each.step, each.time) for each in run.evaluations)
    evaluations = [(0, EventRecord(name="evaluation", step=step, detail=it, time=at)) for it, step, at in scored]
    for rank, event in [*run.events, *evaluations]:
        if event.name in QUIET_EVENTS:
            continue
        step = event.step
        if event.name == "attempt" and len(steps):  # it has no step of its own
            place = int(np.searchsorted(times, event.time)) if is_rising else len(steps)
            step = int(steps[max(0, min(place, len(steps)) - 1)])
        told = {"name": event.name, "title": event_name(event.name), "step": step, "rank": rank}
        told |= {"text": event_text(event), "time": round(event.time - run.first_time, 3)}
        kinds.setdefault(event.name, []).append(told)
    found = [each for kind in kinds.values() for each in kind[-_MOST_EVENTS:]]
    return sorted(found, key=lambda each: each["time"])


def _samples(run: ShownRun) -> list[dict[str, Any]]:
    """Returns the samples of the last evaluations that kept any: [text, PNG in base64] each, one of them empty."""
    found: list[dict[str, Any]] = []
    for event in run.samples:
        items = event.detail.get("items")
        pairs = items[:MOST_SAMPLES] if isinstance(items, list) else []
        good = [pair for pair in pairs if isinstance(pair, list) and [type(each) for each in pair] == [str, str]]
        found += [{"step": event.step, "items": good}] if good else []
    return found


def _hosts(run: ShownRun, points: int) -> list[dict[str, Any]]:
    """Returns what samplers read: a curve for each host and name, over the steps that were made meanwhile."""
    by_host: dict[str, list[HostRecord]] = {}
    for record in run.hosts:
        by_host.setdefault(record.host, []).append(record)
    steps, times = run.columns.steps, run.columns.curves()["time"]
    is_known = np.isfinite(times)
    found = []
    for host, records in sorted(by_host.items()):
        names = sorted({name for record in records for name in record.values})
        read = np.array([[record.values.get(name, math.nan) for name in names] for record in records]).T
        when, starts = np.array([record.time for record in records]), bucket_starts(len(records), points)
        at = np.interp(when, times[is_known], steps[is_known]) if is_known.any() else np.zeros(len(when))
        x = {"step": rounded(means(at, starts), 7), "time": rounded(means(when - run.first_time, starts))}
        curves = _curve(read, starts)
        for name, *values in zip(names, *curves.values(), strict=True):
            found.append({"host": host, "name": name, "x": x, **dict(zip(curves, values, strict=True))})
    return found


def _comm(run: ShownRun) -> list[dict[str, Any]]:
    """Returns rate and bytes of communication by kind and group, as the lowest rank saw it."""
    values = [
        ((each.kind, each.group, each.ranks), each, [each.bandwidth or math.nan, each.bytes, each.calls, each.seconds])
        for each in run.comm
    ]
    found = sorted(_points(run, values).items())
    return [dict(zip(("kind", "group", "ranks"), key, strict=True), points=points) for key, points in found]


def _predicted(run: ShownRun) -> dict[str, Any] | None:
    if (expected := read_expectation(run.folder)) is None:
        return None
    return {name: value for name, value in asdict(expected).items() if value not in (None, "", [], ())}


def _heat_names(run: ShownRun) -> list[str]:
    if not len(run.columns.steps):
        return []
    there = {name for name, values in run.columns.curves().items() if np.isfinite(values).any()}
    there |= {"samples", "step_s"} | ({"late_s"} if run.world_size > 1 else set())
    return [name for name in HEAT if name in there]
