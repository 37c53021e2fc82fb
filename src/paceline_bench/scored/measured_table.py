"""A table of published measurements: rows of text by column, and beside them what each measured.

What a row measured (``value``, ``note``) is kept apart from what it is predicted from: ``Table.rows`` hold no result.
What the texts mean is read elsewhere (``published.py``). ``published.csv`` beside this file is the collection that
comes with the package: 926 rows of 15 public sources. Its column ``split`` says what a row was used for: constants were
fitted on ``calib`` rows, and ``dev`` rows score them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import UsageError
from paceline.untrusted import read_regular

INPUTS = (
    *("id", "model_family", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"),
    *("global_batch", "micro_batch", "gpu", "gpus_per_node", "n_gpus", "dp", "tp", "pp", "vpp", "cp"),
    *("zero_stage_or_fsdp", "precision", "activation_recompute", "compile", "interconnect", "metric_name"),
)
RESULTS = ("value", "note")
SHIPPED = Path(__file__).parent / "published.csv"
_MOST_BYTES = 2**26
NOT_STATED = ("", "n/a", "not stated")


class RowError(Exception):
    """A row that cannot be predicted; the text names the column."""


@dataclass(frozen=True, slots=True)
class Row:
    line: int
    text: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.text["id"]

    @property
    def family(self) -> str:
        return self.id.rpartition("-")[0] or self.id

    @property
    def split(self) -> str:
        return self.text.get("split", "")

    @property
    def metric(self) -> str:
        return self.text["metric_name"]

    def number(self, column: str) -> float | None:
        """Returns a column's number, None where it is empty. Raises RowError for other text, and for none above 0."""
        text = self.text.get(column, "").strip()
        if text.lower() in NOT_STATED:
            return None
        try:
            found = float(text)
        except ValueError:
            raise RowError(f"column {column}: {text!r} is not a number") from None
        if not 0 < found < float("inf"):
            raise RowError(f"column {column}: {text} is not above 0")
        return found

    def whole(self, column: str, default: int | None = None) -> int:
        """Returns a column's whole number. Raises RowError where there is none and no default."""
        found = self.number(column)
        if found is None:
            if default is None:
                raise RowError(f"column {column} is empty")
            return default
        if found != int(found):
            raise RowError(f"column {column}: {found} is not a whole number")
        return int(found)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file, and beside them what each measured, as text."""

    source: str
    rows: tuple[Row, ...]
    measured: tuple[str, ...]

    def of_split(self, split: str | None) -> Table:
        """Returns the rows of one split. Raises UsageError where there are none, with the names that there are."""
        if split is None:
            return self
        keep = [place for place, row in enumerate(self.rows) if row.split == split]
        if not keep:
            names = ", ".join(sorted({row.split for row in self.rows} - {""})) or "none"
            raise UsageError(
                f"{self.source}: no row has split {split!r}\n  the column split names the rows that belong together\n"
                f"  splits of this file: {names}"
            )
        rows, measured = zip(*((self.rows[place], self.measured[place]) for place in keep), strict=True)
        return Table(self.source, rows, measured)


def read_shipped() -> Table:
    return replace(read_table(SHIPPED), source="the published runs that come with paceline")


def read_table(path: Path) -> Table:
    """Reads a CSV of published measurements. Raises UsageError for a file that is not one."""
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        header = list(reader.fieldnames or ())
        records = [(reader.line_num, record) for record in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}\n  it must be a CSV file in UTF-8") from error
    _check_header(path, header)
    if not records:
        raise UsageError(
            f"{path} has a header and no rows\n  a row is one measurement\n  add some, each on a line of its own"
        )
    rows: list[Row] = []
    lines: dict[str, int] = {}
    for line, record in records:
        cells = [*(value for value in record.values() if isinstance(value, str)), *record.get(None, ())]
        if len(cells) != len(header):
            raise UsageError(
                f"{path}, line {line}: {len(cells)} cells under {len(header)} columns\n"
                "  every row has as many as the header\n  a comma inside a cell needs quotes around the cell"
            )
        row = Row(line, {key: (text or "").strip() for key, text in record.items() if key not in RESULTS})
        if not row.id or row.id in lines:
            wrong = f": {row.id} is on line {lines[row.id]} already" if row.id else " is empty"
            raise UsageError(f"{path}, line {line}, column id{wrong}\n  every row has a name of its own")
        lines[row.id] = line
        rows.append(row)
    return Table(str(path), tuple(rows), tuple((record["value"] or "").strip() for _, record in records))


def _check_header(path: Path, header: list[str]) -> None:
    signs = [name for sign, name in ((";", ";"), ("\t", "tabs")) if len(header) == 1 and sign in header[0]]
    doubled = list(dict.fromkeys(name for name in header if header.count(name) > 1))
    missing = [name for name in (*INPUTS, "value") if name not in header]
    if not any(name.strip() for name in header):
        wrong = " is empty\n  the first line of a table of measurements names its columns\n"
        wrong += "  paceline validate without a file scores the selection that comes with paceline"
    elif signs:
        wrong = f": cells are separated by {signs[0]}, not by commas\n"
        wrong += "  a CSV file has commas between cells\n  save it with commas"
    elif doubled:
        wrong = f": the header has {', '.join(doubled)} more than once\n"
        wrong += "  which of the columns is meant cannot be told\n  rename or remove the others"
    elif missing:
        wrong = f": the header lacks {', '.join(missing)}\n  a table of measurements has the columns "
        wrong += f"{', '.join((*INPUTS, *RESULTS, 'split'))}\n  add them; a cell may be empty where it is not known"
    else:
        return
    raise UsageError(f"{path}{wrong}")
