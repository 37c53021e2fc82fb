"""Events in words, and sentences with gaps that numbers with units fill: also those of tables of benchmarks.

    fill("{bytes:B} saved in {seconds:S}[, {steps:n step} later]", {"bytes": 3 * 2**20, "seconds": 0.25})

An event that has a sentence or a note of its own says that. One whose detail has other values than expected is told by
its fields, as is one that only its writer knows. Templates (``words.json``) have the formats of f-strings, and these:

    B    a number of bytes           S    seconds, in a fitting unit       n WORD   a count: 1 step, 2 steps
    N    a large number              U    seconds, in microseconds         Y        yes or no
    ?    before another, which may be none: the part is left out where the value is 0

A list shows its largest value. Of a part in brackets, the first of its alternatives counts for which all values are
there; where there is none, the part is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from paceline.records.records import EventRecord
from paceline.units import format_bytes, format_count, format_seconds

_UNITS: dict[str, Callable[[Any], str]] = {"B": format_bytes, "N": format_count, "S": format_seconds}
_UNITS |= {"U": lambda seconds: f"{1e6 * seconds:,.2f} us", "Y": lambda value: "yes" if value else "no"}
MOST_CHARACTERS = 400
WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
Detail = Mapping[str, Any]
_NAMES = {"roll_back": "roll-back", "attempt": "new attempt", "skipped": "skipped update", "spike": "loss spike"}


class _UnitFormatter(Formatter):
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


def event_text(event: EventRecord) -> str:
    """Returns what happened in words, without the event's name; empty where the name says all."""
    told = event.detail.get("sentence") or event.detail.get("note")
    if told is None:
        make = _WORDS.get(event.name, _fields)
        try:
            told = fill(make, event.detail) if isinstance(make, str) else make(event.detail)
        except (KeyError, TypeError, ValueError, OverflowError):
            told = _fields(event.detail)
    return " ".join(str(told)[:MOST_CHARACTERS].split())


def event_name(name: str) -> str:
    """Returns the name of an event as it is read: ``roll_back`` is a roll-back."""
    return _NAMES.get(name, name.replace("_", " "))


def _fields(detail: Detail) -> str:
    return ", ".join(f"{str(key).replace('_', ' ')} {value}" for key, value in detail.items())


def _roll_back(detail: Detail) -> str:
    told = fill("back from step {from_step:,}: {reason}[; {skipped_samples:?,} samples are left out]", detail)
    told += f"; learning rate x {float(detail['rate_scale']):g}" if detail.get("rate_scale", 1.0) != 1.0 else ""
    return f"{told} (roll-back {int(detail['number'])})"


def _skipped(detail: Detail) -> str:
    row = int(detail["in_a_row"])
    told = fill("the update was left out: the gradient norm is {grad_norm}", detail)
    told += f"; {row} in a row" if row > 1 else ""
    return told + fill("[; loss scale {loss_scale:g}]", detail)


def _first_step(detail: Detail) -> str:
    parts = ", ".join(f"{name} {format_seconds(float(value))}" for name, value in detail.items() if name != "seconds")
    return f"after {format_seconds(float(detail['seconds']))}: {parts}"


ELSEWHERE = "another rank could not keep its part"  # of a snapshot: that rank's own event has the reason
_WORDS: dict[str, str | Callable[[Detail], str]] = {  # templates, or functions
    **WORDS["events"],
    "roll_back": _roll_back,
    "skipped": _skipped,
    "fallback": lambda detail: fill(
        "{backend} in place of {before}: {reason}", {**detail, "before": str(detail["instead_of"]).replace("_", " ")}
    ),
    "first_step": _first_step,
    "settings": lambda detail: ", ".join(f"{name}={value}" for name, value in detail.items()),
}
