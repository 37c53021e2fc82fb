"""Events in words, for the terminal, the log and the page.

    event_text(event)   "restart 1 of 3: rank 1 was killed by SIGKILL after step 37"

An event that has a sentence or a note of its own says that. Records come from files that anybody may have written: an
event whose detail has other values than expected is told by its fields, as is one that only its writer knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.records.records import EventRecord
from paceline.units import format_bytes, format_seconds

MOST_CHARACTERS = 400

Detail = Mapping[str, Any]


def event_text(event: EventRecord) -> str:
    """Returns what happened in words, without the event's name; empty where the name says all."""
    told = event.detail.get("sentence") or event.detail.get("note")
    if told is None:
        make = _WORDS.get(event.name, _fields)
        try:
            told = make(event.detail)
        except (KeyError, TypeError, ValueError, OverflowError):
            told = _fields(event.detail)
    return " ".join(str(told)[:MOST_CHARACTERS].split())


def event_name(name: str) -> str:
    """Returns the name of an event as it is read: ``roll_back`` is a roll-back."""
    return _NAMES.get(name, name.replace("_", " "))


def _fields(detail: Detail) -> str:
    return ", ".join(f"{str(key).replace('_', ' ')} {value}" for key, value in detail.items())


def _checkpoint(detail: Detail) -> str:
    size, seconds = format_bytes(float(detail["bytes"])), format_seconds(float(detail["seconds"]))
    waited = format_seconds(float(detail["stall_seconds"]))
    how = f"in the background; training waited {waited}" if detail.get("background") else "while training waited"
    return f"{size} saved to {detail['folder']} in {seconds}, {how}"


def _roll_back(detail: Detail) -> str:
    told = f"back from step {int(detail['from_step']):,}: {detail['reason']}"
    told += f"; {int(detail['skipped_samples']):,} samples are left out" if detail.get("skipped_samples") else ""
    told += f"; learning rate x {float(detail['rate_scale']):g}" if detail.get("rate_scale", 1.0) != 1.0 else ""
    return f"{told} (roll-back {int(detail['number'])})"


def _skipped(detail: Detail) -> str:
    row = int(detail["in_a_row"])
    told = f"the update was left out: the gradient norm is {detail['grad_norm']}"
    told += f"; {row} in a row" if row > 1 else ""
    return told + (f"; loss scale {float(detail['loss_scale']):g}" if detail.get("loss_scale") is not None else "")


def _spike(detail: Detail) -> str:
    return f"loss {float(detail['loss']):.4g} after a median of {float(detail['median']):.4g}"


def _preempted(detail: Detail) -> str:
    asked = int(detail["ranks_asked"])
    return f"stopped by {detail['signal']}, on {asked} {'rank' if asked == 1 else 'ranks'}; the state is saved"


def _buckets(detail: Detail) -> str:
    count = int(detail["buckets"])
    told = f"{count} {'bucket' if count == 1 else 'buckets'} of up to {float(detail['bucket_mb']):g} MiB"
    if "lost_ms" in detail and "default_lost_ms" in detail:
        lost, usual = float(detail["lost_ms"]), float(detail["default_lost_ms"])
        told += f": {lost:g} ms of a step expected to be lost, {usual:g} ms with the default buckets"
    return told


def _loader(detail: Detail) -> str:
    workers = int(detail["workers"])
    return f"{workers} {'worker' if workers == 1 else 'workers'} of a rank: {detail['reason']}"


def _fallback(detail: Detail) -> str:
    return f"{detail['backend']} in place of {str(detail['instead_of']).replace('_', ' ')}: {detail['reason']}"


def _first_step(detail: Detail) -> str:
    parts = ", ".join(f"{name} {format_seconds(float(value))}" for name, value in detail.items() if name != "seconds")
    return f"after {format_seconds(float(detail['seconds']))}: {parts}"


def _settings(detail: Detail) -> str:
    return ", ".join(f"{name}={value}" for name, value in detail.items())


_WORDS: dict[str, Callable[[Detail], str]] = {
    "checkpoint": _checkpoint,
    "not_saved": lambda detail: str(detail["reason"]),
    "roll_back": _roll_back,
    "skipped": _skipped,
    "spike": _spike,
    "preempted": _preempted,
    "attempt": lambda detail: f"attempt {int(detail['number'])} of this run",
    "restart": lambda detail: f"restart {int(detail['number'])} of {int(detail['of'])}: {detail['reason']}",
    "resume": lambda detail: f"from {detail['checkpoint']}",
    "microbatch": lambda detail: f"{detail['reason']}: {int(detail['microbatch'])} samples at a time from here on",
    "fallback": _fallback,
    "buckets": _buckets,
    "loader": _loader,
    "compiling": lambda detail: str(detail["what"]),
    "compiled": lambda detail: f"{detail['what']}, in {format_seconds(float(detail['seconds']))}",
    "not_compiled": lambda detail: f"{detail['what']}: {detail['why']}",
    "cuda_graphs": lambda detail: f"{'in use' if detail['used'] else 'not used'}: {detail['why']}",
    "precision": lambda detail: str(detail["layers"]),
    "first_step": _first_step,
    "settings": _settings,
}

_NAMES = {"roll_back": "roll-back", "attempt": "new attempt", "skipped": "skipped update", "spike": "loss spike"}
