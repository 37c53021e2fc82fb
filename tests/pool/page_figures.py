"""Figures of a page, and the numbers of the records that the page names: for ``test_figures.py``.

A *figure* is a number with a fraction or a comma and a unit of measurement, outside of code: ``56.2 ms``,
``0.56 times``, ``38.24 GiB``, ``583,374 tokens/s``. A whole number with a unit is a setting or a threshold (``5 %``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
_UNITS = "ms|us|s|%|GiB|MiB|GB|MB|tokens/s|images/s|times|x"
_FIGURE = re.compile(rf"(?<![\w.,/:-])(\d[\d,]*\.\d+|\d{{1,3}}(?:,\d{{3}})+)(?: of)? ?\*{{0,2}}({_UNITS})(?![\w-])")
_RECORD = re.compile(r"[`/]([\w-]+)\.jsonl?\b")
_SECONDS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6}
_SHARES = ("blocked_share", "accuracy", "bubble", "difference", "by_all", "by_room")
_UNIT_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_UNIT_BYTES = {"GiB": 2.0**30, "MiB": 2.0**20, "GB": 1e9, "MB": 1e6}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit, as a page has it."""

    number: str
    unit: str
    line: int

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"

    def is_rounded(self, value: float) -> bool:
        """Whether a value is written so, with as many digits behind the point."""
        decimals = len(self.number.partition(".")[2])
        return f"{value:,.{decimals}f}" == self.number or f"{value:.{decimals}f}" == self.number


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Iterates over the lines that are no code, without what stands in backticks and comments."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`|<!--.*?-->", "", line)


def figures(text: str) -> list[Figure]:
    return [Figure(found[1], found[2], number) for number, line in prose(text) for found in _FIGURE.finditer(line)]


def records_named(text: str) -> list[str]:
    """Returns the records of bench/results that a page names."""
    names = dict.fromkeys(_RECORD.findall(text))
    return [name for name in names if (RESULTS / f"{name}.json").is_file()]


def read_record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Iterates over the numbers of a record, each with the name of its field."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from numbers(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, float(value)


def agrees(figure: Figure, key: str, value: float) -> bool:
    """Whether a field of a record may be what a page calls a figure: its unit must fit the field's name."""
    return any(figure.is_rounded(each) for each in _in_unit(figure.unit, key, value))


def _in_unit(unit: str, key: str, value: float) -> Iterator[float]:
    if unit in _UNIT_SECONDS:
        yield from (value * size / _UNIT_SECONDS[unit] for end, size in _SECONDS.items() if key.endswith(end))
    elif unit == "GiB" and key.endswith("_gib"):
        yield value
    elif unit in _UNIT_BYTES and key.endswith("bytes"):
        yield value / _UNIT_BYTES[unit]
    elif unit in ("tokens/s", "images/s") and key.endswith("_per_s"):
        yield value
    elif unit == "%" and ("error" in key or "ratio" in key or "mfu" in key or key in _SHARES):
        yield from (100 * abs(value), 100 * abs(value - 1))
    elif unit == "%" and ("percent" in key or "points" in key):
        yield abs(value)
    elif unit in ("times", "x") and ("ratio" in key or "speedup" in key or key.startswith("of_")):
        yield from (value, 1 / value if value else 0.0)
