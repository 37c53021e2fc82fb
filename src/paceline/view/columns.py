"""Step records as columns: one grid of numbers by field, rank and step, and curves of any length from it.

    records of a rank  --take-->  grid[field, rank, step]  --curves-->  one value a step  --shrink-->  buckets

How ranks become one value is said in ``_CURVES``: the loss is weighed by counts, the slowest rank sets a step's length,
phases are means. Curves are kept, and computed again only from the first step that changed. A step that is made again,
after a roll-back or a resume, replaces itself and all later ones of the rank. Memory: 4 bytes a value, 75 MB for 64
ranks x 10,000 steps.

``RecordFile`` reads a file as it grows, in whole lines: steps many at once, any other record by ``records.py``. A line
that cannot be used is counted, with a sentence for the first of each file. Files are opened for each look: on network
file systems, opening is what fetches another host's writes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from paceline.records.records import SCHEMA_VERSION, STEPS, Record, StepRecord, parse_line, thinned_mark
from paceline.records.summary import PHASES
from paceline.untrusted import file_inside, open_regular

Array = NDArray[Any]
Rows = list[tuple[Any, ...]]

FIELDS = (  # of a step record that are kept, besides its step and time
    *("step_s", *PHASES, "host_s"),
    *("loss", "loss_sum", "count", "lr", "grad_norm", "samples", "memory_bytes", "mfu", "flops_per_s", "epoch"),
    "steps",  # that were added up
)
KEYS = ("step", "time", *FIELDS)
# What the map of ranks and steps can show. ``late_s`` is a rank's own time above the median of the ranks.
HEAT = ("step_s", "late_s", *PHASES, "host_s", "loss", "samples", "memory_bytes", "mfu")
_INDEX = {name: place for place, name in enumerate(FIELDS)}
_MOST_STEP = 2**53  # floats hold every whole number up to here
_CHUNK_BYTES = 2**20
_VALUES, _ROW = itemgetter("schema", *KEYS[:-1]), attrgetter(*KEYS)
_NAME = re.compile(r"(?:rank-([0-9]{1,9})|host-.{1,200})\.jsonl")


class Columns:
    """The steps of all ranks of a run."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}  # with their rows of the grid
        self.steps: Array = np.empty(0)  # those that any rank has made, in order
        self._grid = np.full((len(FIELDS), 1, 64), np.nan, np.float32)
        self._time = np.full((1, 64), np.nan)  # of day: more digits than the grid holds
        self._curves: dict[str, Array] = {}
        self._dirty = 0  # the curves are right below this column

    def take(self, rank: int, rows: Rows) -> int:
        """Adds steps of a rank, in the order in which it made them; returns how many could not be used."""
        try:
            values = np.array(rows, dtype=np.float64).reshape(-1, len(KEYS))
        except (TypeError, ValueError, OverflowError):
            return sum(self.take(rank, [row]) for row in rows) if len(rows) > 1 else 1
        usable = (values[:, 0] >= 0) & (values[:, 0] < _MOST_STEP) & (values[:, -1] >= 1)
        values = values[usable]
        if len(values):
            row = self.ranks.setdefault(rank, len(self.ranks))
            if row >= self._grid.shape[1]:
                self._grow(2 * self._grid.shape[1], self.steps)
            for part in np.split(values, np.flatnonzero(np.diff(values[:, 0]) <= 0) + 1):
                self._add(row, part)
        return int((~usable).sum())

    def cut(self, ranks: int, step: int) -> None:
        """Forgets what ranks from ``ranks`` on did from ``step`` on: the run went back there, and on without them."""
        column = int(np.searchsorted(self.steps, step))
        for rank, row in self.ranks.items():
            if rank >= ranks and not np.isnan(self._time[row, column:]).all():
                self._forget(row, column)

    def curves(self) -> Mapping[str, Array]:
        """Returns one value a step for each name of ``_CURVES``, and ``time``, the latest time of day of the ranks."""
        width, rows = len(self.steps), len(self.ranks)
        first = min(self._dirty, width)
        if not width:
            return {name: np.empty(0) for name in (*_CURVES, "time")}
        grid, times = self._grid[:, :rows, first:width], self._time[:rows, first:width]
        part = {name: grid[place].astype(np.float64) for name, place in _INDEX.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step without any value is NaN, as it should be
            fresh = {name: make(part) for name, make in _CURVES.items()}
            fresh["time"] = np.nanmax(times, axis=0)
        for name, values in fresh.items():
            kept = self._curves.get(name, np.empty(0))[:first]
            self._curves[name] = np.concatenate([kept, values])
        self._dirty = width
        return self._curves

    def heat(self, name: str, steps: slice, columns: int) -> tuple[list[int], Array, Array]:
        """Returns ranks, the middle step of each bucket, and the mean of a field by rank and bucket."""
        values = self._part(self._grid[_INDEX["step_s" if name == "late_s" else name]], steps)
        if name == "samples":
            values = values / self._part(self._grid[_INDEX["steps"]], steps)
        if name == "late_s" and self.ranks:
            own = values - self._part(self._grid[_INDEX["comm_s"]], steps)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                values = own - np.nanmedian(own, axis=0)
        numbers = self.steps[steps]
        starts = bucket_starts(len(numbers), columns)
        return sorted(self.ranks), means(numbers, starts), means(values, starts)

    def step_of(self, steps: slice) -> tuple[list[int], Array, Array, Array]:
        """Returns ranks, step numbers, end times [rank, step] and lengths with phases [field, rank, step]."""
        fields = np.stack([self._part(self._grid[_INDEX[name]], steps) for name in ("step_s", *PHASES)])
        return sorted(self.ranks), self.steps[steps], self._part(self._time, steps), fields

    def _part(self, values: Array, steps: slice) -> Array:
        """Returns what ``values`` by row and column hold of some steps, in the order of ranks."""
        rows = [self.ranks[rank] for rank in sorted(self.ranks)]
        return np.asarray(values[rows][:, : len(self.steps)][:, steps], dtype=np.float64)

    def _add(self, row: int, values: Array) -> None:
        steps = values[:, 0]
        if len(self.steps):
            self._forget(row, int(np.searchsorted(self.steps, steps[0])))
        new = np.setdiff1d(steps, self.steps, assume_unique=True)
        every = np.union1d(self.steps, new) if len(new) else self.steps
        is_between = len(new) and len(self.steps) and new[0] < self.steps[-1]
        if is_between or len(every) > self._grid.shape[2]:
            self._dirty = 0 if is_between else self._dirty
            self._grow(self._grid.shape[1], every)
        self.steps = every
        columns = np.searchsorted(self.steps, steps)
        self._dirty = min(self._dirty, int(columns[0]))
        self._grid[:, row, columns] = values[:, 2:].T
        self._time[row, columns] = values[:, 1]

    def _forget(self, row: int, column: int) -> None:
        self._grid[:, row, column : len(self.steps)] = np.nan
        self._time[row, column : len(self.steps)] = np.nan
        self._dirty = min(self._dirty, column)

    def _grow(self, rows: int, steps: Array) -> None:
        """Makes room for rows and steps, those among them that other ranks had left out."""
        grid, time, width = self._grid, self._time, len(self.steps)
        places, capacity = np.searchsorted(steps, self.steps), max(grid.shape[2], 2 * len(steps))
        self._grid = np.full((len(FIELDS), rows, capacity), np.nan, np.float32)
        self._time = np.full((rows, capacity), np.nan)
        self._grid[:, : grid.shape[1], places] = grid[:, :, :width]
        self._time[: time.shape[0], places] = time[:, :width]
        self.steps = steps


def bucket_starts(length: int, most: int) -> Array:
    """Returns where buckets of about equal size begin, ``most`` of them at most."""
    count = max(1, min(length, most))
    return np.arange(count) * length // count if length else np.empty(0, int)


def means(values: Array, starts: Array) -> Array:
    """Returns the mean of each bucket along the last axis, of what is there; NaN where nothing is."""
    if not len(starts):
        return values[..., :0]
    is_there = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_there, values, 0.0), starts, axis=-1)
    counts = np.add.reduceat(is_there, starts, axis=-1, dtype=np.int64)
    return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))


def extremes(values: Array, starts: Array) -> tuple[Array, Array]:
    """Returns the least and the greatest value of each bucket; NaN where nothing is."""
    if not len(starts):
        return values[..., :0], values[..., :0]
    return np.fmin.reduceat(values, starts, axis=-1), np.fmax.reduceat(values, starts, axis=-1)


def _ratio(above: Array, below: Array) -> Array:
    return np.asarray(np.where(below > 0, above / np.where(below > 0, below, 1), np.nan))


def _sum(values: Array) -> Array:
    """Adds up ranks; NaN where none has a value."""
    return np.asarray(np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan))


def _mean_of(name: str) -> Callable[[Mapping[str, Array]], Array]:
    return lambda part: np.asarray(np.nanmean(part[name], axis=0))


_CURVES: dict[str, Callable[[Mapping[str, Array]], Array]] = {
    "loss": lambda part: _ratio(_sum(part["loss_sum"]), _sum(part["count"])),
    **{name: _mean_of(name) for name in ("lr", "grad_norm", "epoch")},
    "samples_per_s": lambda part: _ratio(_sum(part["samples"] / part["steps"]), np.nanmax(part["step_s"], axis=0)),
    "mfu": _mean_of("mfu"),
    "flops_per_s": lambda part: _sum(part["flops_per_s"]),
    "step_s": lambda part: np.asarray(np.nanmax(part["step_s"], axis=0)),
    "memory_bytes": lambda part: np.asarray(np.nanmax(part["memory_bytes"], axis=0)),
    **{name: _mean_of(name) for name in ("host_s", *PHASES)},
}


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a look found in a file: steps as rows of ``KEYS``; other records with the number of rows before them."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    others: list[tuple[int, Record]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.rows.append(_ROW(record))
        else:
            self.others.append((len(self.rows), record))


@dataclass(slots=True, kw_only=True)
class RecordFile:
    """One file of records. ``rank`` is None for that of a host's sampler. ``known`` is what somebody has read of it."""

    path: Path
    rank: int | None
    offset: int = 0
    size: int = 0
    mark: bytes = b""
    num_bad: int = 0
    first_bad: str = ""
    known: Sequence[Record] = ()

    def read(self, most_bytes: int = _CHUNK_BYTES) -> Batch | None:
        """Returns what is new, up to ``most_bytes`` of it; None where nothing is. Raises OSError."""
        with open_regular(self.path) as raw, io.BufferedReader(raw) as file:
            self.size = os.fstat(file.fileno()).st_size
            mark, before = thinned_mark(file), self.mark
            self.mark = mark
            if self.size < self.offset or (self.offset and mark != before):
                raise RewrittenError(str(self.path))
            if self.size == self.offset:
                return None
            if self.known:
                self.offset, batch = self.size, Batch()
                for record in self.known:
                    batch.add(record)
                return batch
            file.seek(self.offset)
            data = file.read(min(most_bytes, self.size - self.offset)) or b""
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) >= most_bytes:  # no record is so long: the file is none of ours
                self.offset += len(data)
                self._refuse(f"has a line of more than {most_bytes:,} bytes")
            return None
        self.offset += end
        batch = Batch()
        for kind, lines in groupby(data[:end].split(b"\n")[:-1], key=lambda line: line[:14]):
            if kind in STEPS:
                self._take_steps(batch, list(lines))
            else:
                for line in lines:
                    self._take_line(batch, line)
        return batch

    def _take_steps(self, batch: Batch, lines: list[bytes]) -> None:
        """Parses lines of steps together; where one is damaged, each by itself."""
        try:
            found = from_json(b"[" + b",".join(lines) + b"]")
            rows = list(map(_VALUES, found))
            if len(rows) != len(lines) or not all(row[0] == SCHEMA_VERSION and type(row[1]) is int for row in rows):
                raise ValueError
        except (ValueError, TypeError, AttributeError, KeyError):
            for line in lines:
                self._take_line(batch, line)
        else:
            batch.rows += [(*row[1:], each.get("steps", 1)) for row, each in zip(rows, found, strict=True)]

    def _take_line(self, batch: Batch, line: bytes) -> None:
        if not line.strip():
            return
        try:
            if line.startswith(STEPS):
                batch.rows.append(_old_row(line))
            else:
                batch.add(parse_line(line))
        except ValueError as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        self.num_bad += 1
        self.first_bad = self.first_bad or why

    @property
    def problem(self) -> str:
        """What could not be read, in a sentence; empty where all could."""
        if not self.num_bad:
            return ""
        lines = "a line" if self.num_bad == 1 else f"{self.num_bad:,} lines"
        return f"{self.path.name}: {lines} could not be read ({self.first_bad[:200]}); the rest is shown"


class RewrittenError(Exception):
    """A file that became shorter: somebody wrote it anew."""


def _old_row(line: bytes) -> tuple[Any, ...]:
    """Parses a step, with what an older version did not write as None. Raises ValueError."""
    values = from_json(line)
    version = values.get("schema")
    if type(version) is not int or version > SCHEMA_VERSION:
        raise ValueError(f"a step has schema {version!r}, and this version of Paceline reads up to {SCHEMA_VERSION}")
    if type(values.get("step")) is not int or not isinstance(values.get("time"), int | float):
        raise ValueError("a step has no number or no time")
    return (*map(values.get, KEYS[:-1]), values.get("steps", 1))


def record_files(folder: Path) -> list[RecordFile]:
    """Returns the files of records inside a run's folder, those of low ranks first; none where it may not be read."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        records = file_inside(folder, "records")
        for entry in os.scandir(records):
            with contextlib.suppress(ValueError):
                if name := _NAME.fullmatch(entry.name):
                    path, size = file_inside(records, entry.name), entry.stat(follow_symlinks=False).st_size
                    found.append(RecordFile(path=path, rank=int(name[1]) if name[1] else None, size=size))
    return sorted(found, key=lambda each: (each.rank is None, each.rank or 0, each.path.name))
