"""Numbers with units, as people read them.

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
from collections.abc import Mapping
from string import Formatter
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_bytes(num_bytes: float) -> str:
    """Writes a size with a binary unit: ``format_bytes(1536) == '1.5 KiB'``."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Writes a count with a decimal suffix: ``format_count(11_200_000) == '11.2M'``."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.1f}{suffix}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.1f}"


def format_flops(rate: float) -> str:
    """Writes FLOP per second with a decimal prefix: ``format_flops(4.12e14) == '412.0 TFLOP/s'``."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if rate >= scale:
            return f"{rate / scale:.1f} {prefix}FLOP/s"
    return f"{rate / 1e6:.1f} MFLOP/s"


def format_seconds(seconds: float) -> str:
    """Writes a duration in the unit that keeps it readable: ``format_seconds(0.0042) == '4.2 ms'``."""
    if seconds <= 0:  # clocks that were set back
        return "0 s"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


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


_UNITS: dict[str, Any] = {
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
