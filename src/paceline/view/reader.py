"""Reads the files of records of a run as they grow, and never gives up on one that is damaged.

A look reads what is new in whole lines. Steps are parsed many at once and go to columns; any other record is parsed by
``records.py``. A line that cannot be used (cut, damaged, of a newer version) is counted, with a sentence for the first
of each file. A file that became shorter was written anew, and is read from its beginning.

Files are opened for each look: on network file systems, opening is what fetches another host's writes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from paceline.records.records import SCHEMA_VERSION, Record, StepRecord, parse_line
from paceline.untrusted import file_inside, open_regular
from paceline.view.columns import KEYS

CHUNK_BYTES = 2**20
_STEP = b'{"type":"step"'
_VALUES = itemgetter("schema", *KEYS)
_NAME = re.compile(r"(rank|host)-(.{1,200})\.jsonl")


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a look found in a file: steps as rows of ``KEYS``; other records with the number of rows before them."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    others: list[tuple[int, Record]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RecordFile:
    """One file of records. ``rank`` is None for that of a host's sampler."""

    path: Path
    rank: int | None
    offset: int = 0
    size: int = 0
    num_bad: int = 0
    first_bad: str = ""

    def read(self, most_bytes: int = CHUNK_BYTES) -> Batch | None:
        """Returns what is new, up to ``most_bytes`` of it; None where nothing is. Raises OSError."""
        with open_regular(self.path) as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < self.offset:
                raise RewrittenError(str(self.path))
            if self.size == self.offset:
                return None
            file.seek(self.offset)
            data = file.read(min(most_bytes, self.size - self.offset)) or b""
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) >= most_bytes:  # no record is so long: the file is none of ours
                self.offset += len(data)
                self._refuse(f"has a line of more than {most_bytes:,} bytes")
            return None
        self.offset += end
        return self._parse(data[:end].split(b"\n")[:-1])

    def _parse(self, lines: list[bytes]) -> Batch:
        batch = Batch()
        steps: list[bytes] = []
        for line in lines:
            if line.startswith(_STEP):
                steps.append(line)
                continue
            self._take_steps(batch, steps)
            steps = []
            self._take_line(batch, line)
        self._take_steps(batch, steps)
        return batch

    def _take_steps(self, batch: Batch, lines: list[bytes]) -> None:
        """Parses lines of steps together; where one is damaged, each by itself."""
        if not lines:
            return
        try:
            found = from_json(b"[" + b",".join(lines) + b"]")
            rows = list(map(_VALUES, found))
            if len(rows) != len(lines) or not all(row[0] == SCHEMA_VERSION and type(row[1]) is int for row in rows):
                raise ValueError
        except (ValueError, TypeError, AttributeError, KeyError):
            for line in lines:
                self._take_line(batch, line)
        else:
            batch.rows += [row[1:] for row in rows]

    def _take_line(self, batch: Batch, line: bytes) -> None:
        if not line.strip():
            return
        try:
            found = _parse_any(line)
        except ValueError as error:
            self._refuse(str(error))
        else:
            if isinstance(found, tuple):
                batch.rows.append(found)
            else:
                batch.others.append((len(batch.rows), found))

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


def _parse_any(line: bytes) -> Record | tuple[Any, ...]:
    """Parses one line: a step as a row, with what an older version did not write as None. Raises ValueError."""
    if not line.startswith(_STEP):
        record = parse_line(line)
        return _row(record) if isinstance(record, StepRecord) else record
    values = from_json(line)
    version = values.get("schema")
    if type(version) is not int or version > SCHEMA_VERSION:
        raise ValueError(f"a step has schema {version!r}, and this version of Paceline reads up to {SCHEMA_VERSION}")
    if type(values.get("step")) is not int or not isinstance(values.get("time"), int | float):
        raise ValueError("a step has no number or no time")
    return tuple(map(values.get, KEYS))


def _row(step: StepRecord) -> tuple[Any, ...]:
    return tuple(getattr(step, key) for key in KEYS)


def record_files(folder: Path) -> list[RecordFile]:
    """Returns the files of records in a run's folder, those of low ranks first; none that lies outside of it.

    Nor any of a folder that may not be read: it may be another user's.
    """
    records = folder / "records"
    home = Path(os.path.realpath(folder))
    if not Path(os.path.realpath(records)).is_relative_to(home):
        return []
    try:
        entries = list(os.scandir(records))
    except OSError:
        return []
    found = []
    for entry in entries:
        name = _NAME.fullmatch(entry.name)
        if name is None or (name[1] == "rank" and not re.fullmatch(r"[0-9]{1,9}", name[2])):
            continue
        try:
            path = file_inside(records, entry.name)
        except ValueError:
            continue
        found.append(RecordFile(path=path, rank=int(name[2]) if name[1] == "rank" else None))
    return sorted(found, key=lambda each: (each.rank is None, each.rank or 0, each.path.name))
