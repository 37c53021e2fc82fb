"""Keeps the records of a long run small: neighbouring steps are added up, more of them the longer it is.

A rank that keeps ``most`` lines of steps and has made s of them:

    cut     the multiple of most / 2 up to s, less TAIL       what is newer stays as it is
    size    the least power of two with cut / size <= most    a line for each ``size`` steps up to there

Both follow from the number of the step, so all ranks add up the same steps, and two equal runs have equal lines. Sums
stay exact. The first steps of an attempt stay as they are, and so do runs, evaluations, events and ends. No line
reaches over a step that the run went back to: what counts and what was made again stay apart. Communication and loads
of experts are added up over 16 such lines, and samples of a host like steps, by their number. The file is replaced
whole, and its second line says so.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from paceline.records import records as kinds

FEWEST, MOST, ALL_LINES = 64, 4096, 2**15
TAIL = 16
_FIRST = 4
_COMM_LINES = 16
_CLASS = math.log(1.05)
_LENGTHS = re.compile(r"(-?\d{1,4}):(\d{1,12})")
_SUMS = ("loss_sum", "count", "samples")
_LAST = ("step", "position", "epoch", "time", "loss_scale", "allocated_bytes", "reserved_bytes")
_OF_LOADS = ("steps", "tokens", "dropped")
_GREATEST = ("memory_bytes", "peak_bytes")
_NO_MEAN = {each.name: None if "None" in str(each.type) else math.nan for each in fields(kinds.StepRecord)}
_MEANS = [each.name for each in fields(kinds.StepRecord) if each.name not in (*_SUMS, *_LAST, *_GREATEST, "loss")]


def lines_kept(asked: int | str, ranks: int | str) -> int | None:
    """Returns how many lines of steps a rank keeps, about: by default fewer where there are many ranks; None: all."""
    if isinstance(asked, int) or asked == "all":
        return asked if isinstance(asked, int) else None
    return min(MOST, max(FEWEST, ALL_LINES // ranks)) if isinstance(ranks, int) else MOST


def thin_lines(data: bytes, most: int) -> bytes | None:
    """Returns a file of records with older ones added up; None where there is nothing to add up yet."""
    lines = data.splitlines(keepends=True)
    mark = lines.pop(1) if len(lines) > 1 and kinds.THINNED in lines[1][:200] else b""
    records = [_parse(line) for line in lines]
    places, starts = _places(records)
    cut = next(reversed(places.values()), 0) // (most // 2) * (most // 2) - TAIL
    if cut <= _FIRST:
        return None
    size = 1 << max(0, math.ceil(math.log2(cut / most)))
    tail = next((at for at, place in places.items() if at >= max(starts) and place > cut), len(lines))
    kept = list(_added_up(lines[:tail], records, places, starts, size))
    body, rest = sum(map(len, kept)), b"".join(lines[tail:])
    removed = len(data) - len(mark) - len(rest) - body + kinds.marked(mark, "removed")
    detail = {"each": size, "body": body, "removed": removed}
    told = kinds.EventRecord(name="thinned", step=cut, detail=detail, time=time.time())
    return b"".join([kept[0], kinds.to_line(told).encode(), *kept[1:], rest])


def _parse(line: bytes) -> kinds.Record | None:
    try:
        return kinds.parse_line(line)
    except ValueError:  # stays as it is, for whoever reads it to tell of
        return None


def _places(records: Sequence[kinds.Record | None]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the number of each step or sample by its line, and of those that an attempt begins or goes back with."""
    places, starts, before, is_new = dict[int, int](), dict[int, int](), 0, True
    for at, record in enumerate(records):
        is_new = is_new or isinstance(record, kinds.RunRecord)
        if isinstance(record, kinds.StepRecord | kinds.HostRecord):
            places[at] = record.step if isinstance(record, kinds.StepRecord) else before + record.samples
            if is_new or places[at] <= before:
                starts[at] = places[at]
            before, is_new = places[at], False
    return places, starts


def _added_up(
    lines: Sequence[bytes],
    records: Sequence[kinds.Record | None],
    places: Mapping[int, int],
    starts: Mapping[int, int],
    size: int,
) -> Iterator[bytes]:
    """Yields lines, of which ``size`` neighbours each are added up."""
    borders, singles = {start - 1 for start in starts.values()}, 0
    timed: dict[Any, list[bytes]] = {}
    sent: dict[Any, list[bytes]] = {}  # by kind and group, or by layer
    for at, (line, record) in enumerate(zip(lines, records, strict=False)):
        if at in starts or isinstance(record, kinds.RunRecord | kinds.EndRecord):
            yield from chain(_flushed(timed), _flushed(sent))
        singles = _FIRST if at in starts else singles - (at in places)
        if isinstance(record, kinds.CommRecord):
            sent.setdefault((record.kind, record.group, record.ranks), []).append(line)
        elif isinstance(record, kinds.ExpertsRecord):
            sent.setdefault((record.layer, len(record.choices), record.ranks), []).append(line)
        elif at in places and singles <= 0:
            timed.setdefault("", []).append(line)
            if places[at] % size == 0 or places[at] in borders:
                yield from _flushed(timed)
            if places[at] % (_COMM_LINES * size) == 0:
                yield from _flushed(sent)
        else:
            yield line
    yield from chain(_flushed(timed), _flushed(sent))


def _flushed(blocks: dict[Any, list[bytes]]) -> list[bytes]:
    """Empties blocks of lines; returns one line for each."""
    found = [block[0] if len(block) == 1 else _sum_of(list(map(kinds.parse_line, block))) for block in blocks.values()]
    blocks.clear()
    return found


def _sum_of(records: list[Any]) -> bytes:
    adders: dict[type, Callable[[Any], kinds.Record]] = {kinds.CommRecord: add_comm, kinds.HostRecord: add_samples}
    adders[kinds.ExpertsRecord] = add_loads
    return kinds.to_line(adders.get(type(records[-1]), add_steps)(records)).encode()


def add_comm(records: Sequence[kinds.CommRecord]) -> kinds.CommRecord:
    """Adds up operations of one kind and group."""
    sums = {name: sum(getattr(each, name) for each in records) for name in ("calls", "bytes", "seconds")}
    return replace(records[-1], **sums)


def add_loads(records: Sequence[kinds.ExpertsRecord]) -> kinds.ExpertsRecord:
    """Adds up what the router of one layer did."""
    values: dict[str, Any] = {name: sum(getattr(each, name) for each in records) for name in _OF_LOADS}
    for name in ("entropy", "auxiliary"):
        values[name] = _mean(((getattr(each, name), each.tokens) for each in records), 0.0)
    values["choices"] = tuple(map(sum, zip(*(each.choices for each in records), strict=True)))
    return replace(records[-1], **values)


def add_steps(records: Sequence[kinds.StepRecord]) -> kinds.SpanRecord:
    """Adds up steps of a rank that follow one another."""
    last = records[-1]
    values: dict[str, Any] = {name: sum(getattr(each, name) for each in records) for name in _SUMS}
    values |= {name: getattr(last, name) for name in _LAST}
    for name in _GREATEST:
        values[name] = max((size for each in records if (size := getattr(each, name)) is not None), default=None)
    for name in _MEANS:
        values[name] = _mean(((getattr(each, name), each.steps) for each in records), _NO_MEAN[name])
    return kinds.SpanRecord(
        **values,
        loss=values["loss_sum"] / values["count"] if values["count"] else None,
        steps=sum(each.steps for each in records),
        skipped=sum(each.num_skipped for each in records),
        slowest_s=max(getattr(each, "slowest_s", each.step_s) for each in records),
        least_loss=min(_finite(getattr(each, "least_loss", each.loss) for each in records), default=None),
        most_loss=max(_finite(getattr(each, "most_loss", each.loss) for each in records), default=None),
        lengths=" ".join(f"{number}:{count}" for number, count in sorted(lengths_of(records).items())),
    )


def add_samples(records: Sequence[kinds.HostRecord]) -> kinds.HostRecord:
    """Averages samples of a host that follow one another."""
    names = dict.fromkeys(name for each in records for name in each.values)
    means = {name: _mean((each.values.get(name), each.samples) for each in records) for name in names}
    values = {name: value for name, value in means.items() if value is not None}
    return replace(records[-1], values=values, samples=sum(each.samples for each in records))


def part_until(record: kinds.SpanRecord, step: int) -> kinds.SpanRecord:
    """Returns the part of a record up to a step: the run went back into its midst. Sums are by its share."""
    steps = record.steps - (record.step - step)
    sums: dict[str, Any] = {name: getattr(record, name) * steps / record.steps for name in _SUMS}
    sums |= {name: round(sums[name]) for name in ("count", "samples")}
    return replace(record, step=step, steps=steps, **sums)


def lengths_of(records: Iterable[kinds.StepRecord]) -> Counter[int]:
    """Returns how many steps took how long, by the number of a class that is 5 % wide."""
    found: Counter[int] = Counter()
    for each in records:
        if isinstance(each, kinds.SpanRecord):
            found.update({int(number): int(count) for number, count in _LENGTHS.findall(each.lengths)})
        elif 0 < each.step_s < math.inf:
            found[math.floor(math.log(each.step_s) / _CLASS)] += 1
    return found


def percentile(lengths: Mapping[int, int], share: float) -> float:
    """Returns the length that so large a share of the steps does not exceed, to 2.5 %; 0 without any."""
    left = share * sum(lengths.values())
    for number in sorted(lengths):
        left -= lengths[number]
        if left <= 0:
            return math.exp((number + 0.5) * _CLASS)
    return 0.0


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(pairs: Iterable[tuple[float | None, int]], otherwise: float | None = None) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and math.isfinite(value)]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else otherwise
