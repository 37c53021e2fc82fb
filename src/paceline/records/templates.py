"""Sentences with gaps, which numbers with units fill: of events, and of the tables of benchmarks.

    fill("{bytes:B} saved in {seconds:S}[, {steps:n step} later]", {"bytes": 3 * 2**20, "seconds": 0.25})

A template names values, with format specifications as in f-strings and these besides:

    B    a number of bytes           S    seconds, in a fitting unit       n WORD   a count: 1 step, 2 steps
    N    a large number              U    seconds, in microseconds         Y        yes or no
    ?    before another, which may be none: the part is left out where the value is 0

A list shows its largest value. Of a part in brackets, the first of its alternatives counts for which all values are
there; where there is none, the part is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from paceline.units import format_bytes, format_count, format_seconds


class _UnitFormatter(Formatter):
    """Knows the specifications above; raises KeyError for a value that is not there."""

    def format_field(self, value: Any, format_spec: str) -> str:
        spec = format_spec.removeprefix("?")
        if value is None or (spec != format_spec and not value):
            raise KeyError
        value = max(value) if isinstance(value, list) else value
        value = float(value) if isinstance(value, str) and spec else value  # "nan", as strict JSON has it
        if spec in _UNITS:
            return _UNITS[spec](value)
        if spec.startswith("n "):
            return f"{value:d} {spec[2:]}{'' if value == 1 else 's'}"
        text = "" if format_spec == "?" else format(value, spec)
        return text.replace("%", " %") if spec.endswith("%") else text


_UNITS: dict[str, Callable[[Any], str]] = {
    "B": format_bytes,
    "N": format_count,
    "S": format_seconds,
    "U": lambda seconds: f"{1e6 * seconds:,.2f} us",
    "Y": lambda value: "yes" if value else "no",
}


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Fills a template as the top of this file says. Raises KeyError for a value that is not there."""
    told = ""
    for place, part in enumerate(re.split(r"\[(.*?)\]", template)):
        for each in part.split("|") if place % 2 else [part]:
            try:
                told += _UnitFormatter().vformat(each, (), values)
                break
            except KeyError:
                if place % 2 == 0:
                    raise
    return told
