"""Events in words, for the terminal, the log and the page.

    event_text(event)   "restart 1 of 3: rank 1 was killed by SIGKILL after step 37"

An event that has a sentence or a note of its own says that. Records come from files that anybody may have written: an
event whose detail has other values than expected is told by its fields, as is one that only its writer knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.records.records import EventRecord
from paceline.records.templates import fill
from paceline.units import format_seconds

MOST_CHARACTERS = 400

Detail = Mapping[str, Any]


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


_WORDS: dict[str, str | Callable[[Detail], str]] = {  # see templates.py, or functions
    "checkpoint": "{bytes:B} saved to {folder} in {seconds:S}, "
    "[{background:?}in the background; training waited {stall_seconds:S}|while training waited]",
    "not_saved": "{reason}",
    "roll_back": _roll_back,
    "skipped": _skipped,
    "spike": "loss {loss:.4g} after a median of {median:.4g}",
    "preempted": "stopped by {signal}, on {ranks_asked:n rank}; the state is saved",
    "attempt": "attempt {number:d} of this run",
    "restart": "restart {number:d} of {of:d}: {reason}",
    "resume": "from {checkpoint}",
    "microbatch": "{reason}: {microbatch:d} samples at a time from here on",
    "fallback": lambda detail: fill(
        "{backend} in place of {before}: {reason}", {**detail, "before": str(detail["instead_of"]).replace("_", " ")}
    ),
    "buckets": "{buckets:n bucket} of up to {bucket_mb:g} MiB"
    "[: {lost_ms:g} ms of a step expected to be lost, {default_lost_ms:g} ms with the default buckets]",
    "loader": "{workers:n worker} of a rank: {reason}",
    "compiling": "{what}",
    "compiled": "{what}, in {seconds:S}",
    "not_compiled": "{what}: {why}",
    "cuda_graphs": "[{used:?}in use|not used]: {why}",
    "precision": "{layers}",
    "first_step": _first_step,
    "settings": lambda detail: ", ".join(f"{name}={value}" for name, value in detail.items()),
}

_NAMES = {"roll_back": "roll-back", "attempt": "new attempt", "skipped": "skipped update", "spike": "loss spike"}
