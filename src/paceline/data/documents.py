"""Documents in files of text, JSON lines and parquet, cut into pieces that processes read side by side.

.txt, others     a file is one document; a piece ends behind a line
.jsonl, .json    a line is one document, in the field ``text``
.parquet         a row is one document, in the column ``text``; a piece has whole row groups
"""

from __future__ import annotations

import codecs
import io
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import DataError
from paceline.untrusted import open_regular, reason_of

Skip: TypeAlias = Callable[[Callable[[], str]], None]
"""Takes what makes the message of a document that cannot be read: to find its line, the file is read up to there."""

_BLOCK = 2**18
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_MOST_LINE_BYTES = 2**28
_MARKS = (  # of UTF-32 first: its mark in little-endian begins with that of UTF-16
    *((mark, "UTF-32") for mark in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    *((mark, "UTF-16") for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a file: bytes ``first`` to ``last``, or row groups of parquet."""

    path: str
    first: int
    last: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Text:
    """Some text, and whether a document ends behind it."""

    text: str
    ends: bool


def find_sources(paths: list[Path]) -> list[Path]:
    """Returns the files to read, by name: those given, and all in folders that are given."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
        found += inside if path.is_dir() else [path]
    missing = [path for path in found if not path.is_file()]
    if missing or not found:
        what = f"{missing[0]} is no file" if missing else f"{paths[0]} has no files"
        rule = "a source is a text file, JSON lines, parquet, or a folder of them; relative paths start at"
        raise DataError(f"{what}\n  {rule} {Path.cwd()}\n  check the path")
    return found


def cut_pieces(paths: list[Path], piece_bytes: int) -> list[Piece]:
    pieces = []
    for path in paths:
        if path.suffix != ".parquet":
            size = path.stat().st_size
            for first in range(0, size, piece_bytes):
                last = min(first + piece_bytes, size)
                pieces.append(Piece(path=str(path), first=first, last=last, bytes=last - first))
            continue
        with _open_parquet(str(path)) as file:
            sizes = [file.metadata.row_group(each).total_byte_size for each in range(file.metadata.num_row_groups)]
        first, held = 0, 0
        for number, size in enumerate(sizes, start=1):
            held += size
            if held >= piece_bytes or number == len(sizes):
                pieces.append(Piece(path=str(path), first=first, last=number, bytes=held))
                first, held = number, 0
    return pieces


def read_piece(piece: Piece, field: str, skip: Skip) -> Iterator[Text]:
    """Yields the text of a piece in order. Hands ``skip`` what says which document cannot be read, and why."""
    path = Path(piece.path)
    if path.suffix == ".parquet":
        yield from _read_parquet(piece, field, skip)
    elif path.suffix in _JSON_LINES:
        for place, line in _lines(piece):
            try:
                if line.strip():
                    yield Text(_text_of(line, field), True)
            except (ValueError, RecursionError) as error:
                skip(partial(_unusable, piece.path, place, reason_of(error)))
    else:
        yield from _read_text(piece)


def _read_text(piece: Piece) -> Iterator[Text]:
    """Yields blocks of whole lines: lines of the piece are those that begin in it."""
    with open_regular(Path(piece.path)) as raw:
        file = io.BufferedReader(raw, _BLOCK)
        place = _first_line(file, piece)
        while place < piece.last and (block := file.read(min(_BLOCK, piece.last - place))):
            if not block.endswith(b"\n"):
                block += _read_line(file, piece.path, place)
            yield Text(decode_text(block, Path(piece.path), place), False)
            place += len(block)
    if piece.last >= Path(piece.path).stat().st_size:
        yield Text("", True)


def _text_of(line: bytes, field: str) -> str:
    """Returns the text of a line of JSON. Raises ValueError with the fields that there are."""
    value = json.loads(line.rstrip())
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, and a document an object with the field {field!r}")
    text = value.get(field)
    if not isinstance(text, str):
        what = f"its {field!r} is no text" if field in value else f"it has no field {field!r}"
        named = ", ".join(map(repr, value)) or "none"
        raise ValueError(f"{what}; its fields are {named} (--field)")
    if b"\\ud" in line.lower():
        text.encode()  # half of a surrogate pair is no text
    return text


def _unusable(path: str, place: int, reason: str) -> str:
    return f"{path}: line {line_at(Path(path), place)} cannot be used: {reason}"


def line_at(path: Path, place: int) -> int:
    """Returns the number of the line, from 1, that a byte of a file is in. Reads the file up to there."""
    line = 1
    with open_regular(path) as file:
        while place > 0 and (block := file.read(min(_BLOCK, place))):
            line += block.count(b"\n")
            place -= len(block)
    return line


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that begin in a piece, with their first byte. A file without ends of lines is cut anywhere."""
    with open_regular(Path(piece.path)) as raw:
        file = io.BufferedReader(raw, _BLOCK)
        place = _first_line(file, piece)
        while place < piece.last and (line := _read_line(file, piece.path, place)):
            yield place, line
            place += len(line)


def _first_line(file: Any, piece: Piece) -> int:
    if not piece.first:
        return 0
    file.seek(piece.first - 1)
    return piece.first + len(_read_line(file, piece.path, piece.first)) - 1


def _read_line(file: Any, path: str, place: int) -> bytes:
    line: bytes = file.readline(_MOST_LINE_BYTES + 1)
    if len(line) > _MOST_LINE_BYTES:
        what = f"{path}: line {line_at(Path(path), place)} is longer than {_MOST_LINE_BYTES:,} bytes"
        raise DataError(f"{what}\n  text is read by lines\n  break it, or make it a field of parquet")
    return line


def decode_text(content: bytes, path: Path, place: int = 0) -> str:
    """Returns the text of bytes from a place of a file on. Raises ``DataError`` with the command that converts it."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        with open_regular(path) as file:
            first = file.read(4)
        known = next((name for mark, name in _MARKS if first.startswith(mark)), None)
        is_known = "" if known is None else f" but {known}"
        source, target = shlex.quote(str(path)), shlex.quote(f"{path.with_suffix('')}-utf8{path.suffix}")
        at = place + error.start
        what = f"{path} is not UTF-8{is_known}: {error.reason} at byte {at}, in line {line_at(path, at)}"
        fix = f"convert the file: iconv -f {known or 'LATIN1'} -t UTF-8 {source} > {target}"
        raise DataError(f"{what}\n  text is read as UTF-8\n  {fix}") from error


def _open_parquet(path: str) -> Any:
    try:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path)
    except ImportError as error:
        rule = "pip install 'paceline[data]'"
        raise DataError(f"parquet needs the package pyarrow, which is not installed\n  {rule}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}\n  it may be cut off\n  copy it again") from error


def _read_parquet(piece: Piece, field: str, skip: Skip) -> Iterator[Text]:
    with _open_parquet(piece.path) as file:
        if field not in file.schema_arrow.names:
            fix = f"its columns are {', '.join(file.schema_arrow.names)}: give --field"
            raise DataError(f"{piece.path} has no column {field!r}\n  the text of a document is in one column\n  {fix}")
        row = sum(file.metadata.row_group(each).num_rows for each in range(piece.first))
        groups = list(range(piece.first, piece.last))
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[field], use_threads=False):
            for text in batch.column(0).to_pylist():
                if isinstance(text, str):
                    yield Text(text, True)
                else:
                    skip(partial("{}: row {} has no text in {!r}".format, piece.path, row, field))
                row += 1
