"""What each field of a layout may be: the rules that come before all others, for layouts that are made in code."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from paceline.errors import Problem
from paceline.plan.layout import CHECKPOINTS, STRATEGIES, Algorithm, Buffers, Compile, Compression, Layout, Offload
from paceline.schedule.grid import Schedule
from paceline.schedule.schedules import CHUNKS

WORDS: dict[str, tuple[str, ...]] = {
    "strategy": STRATEGIES,
    "algorithm": get_args(Algorithm),
    "checkpoint_activations": CHECKPOINTS,
    "buffers": get_args(Buffers),
    "compile": get_args(Compile),
    "schedule": tuple(CHUNKS),
}
"""What fields may be that are one of some words; a schedule may also be one's own."""

MEANINGS: dict[str, str] = json.loads(Path(__file__).with_name("meanings.json").read_text(encoding="utf-8"))
"""What fields mean that a config and the command line may set, in a sentence each."""

_AT_LEAST = {  # whole numbers
    **dict.fromkeys(("pipeline", "tensor", "context", "expert", "microbatch", "accumulate"), 1),
    **dict.fromkeys(("data", "shard_ranks", "node_ranks", "chunks", "prefetch"), 0),
}
_OBJECTS = {
    "offload": (Offload, "paceline.Offload(optimizer=True)"),
    "compression": (Compression, 'paceline.Compression(policy="topk")'),
}


def field_problems(layout: Layout) -> list[Problem]:
    """Lists the fields of a layout whose values are of no use: unknown words, wrong types, numbers out of range."""
    return [problem for each in fields(layout) for problem in _problems(each.name, getattr(layout, each.name))]


def unknown_word(name: str, value: Any, words: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem where a value is none of the words, with the one that is most like it."""
    if value not in words:
        near = difflib.get_close_matches(str(value), words, n=1)
        fix = f"did you mean {near[0]}?" if near else ""
        yield Problem(what=f"{name} = {value!r} is unknown", rule=f"it is one of {', '.join(words)}", fix=fix)


def _problems(name: str, value: Any) -> Iterator[Problem]:
    if name == "schedule" and isinstance(value, str):
        if value not in CHUNKS:
            near = difflib.get_close_matches(value, CHUNKS, n=1)
            fix = f"did you mean {near[0]}?" if near else "take one of them, or a schedule of your own"
            yield Problem(
                what=f"there is no schedule {value!r}", rule=f"the schedules are {', '.join(CHUNKS)}", fix=fix
            )
    elif name in WORDS and name != "schedule":
        yield from unknown_word(name, value, WORDS[name])
    elif name in _AT_LEAST:
        if type(value) is not int or value < _AT_LEAST[name]:
            least = _AT_LEAST[name]
            yield Problem(what=f"{name} = {value!r}", rule="it is a whole number", fix=f"give {least} or more")
    elif name in _OBJECTS:
        kind, example = _OBJECTS[name]
        if not isinstance(value, kind):
            yield Problem(what=f"{name} = {value!r}", rule=f"it is a paceline.{kind.__name__}", fix=f"give {example}")
    elif name in ("bucket_mb", "first_bucket_mb", "unit_mb"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not is_number and not (name == "unit_mb" and value is None):
            yield Problem(what=f"{name} = {value!r}", rule="it is a size in MiB", fix="give a number, 0 or more")
    elif isinstance(getattr(_DEFAULT, name), bool) and name != "reshard_after_forward":
        if not isinstance(value, bool):
            yield Problem(what=f"{name} = {value!r}", rule="it is a yes or no", fix="give True or False")
    else:
        yield from _mixed(name, value)


def _mixed(name: str, value: Any) -> Iterator[Problem]:
    rules = {
        "reshard_after_forward": (isinstance(value, int), "True, False, or a number of ranks"),
        "schedule": (isinstance(value, Schedule), "the name of a schedule, or a schedule"),
        "stages": (value in ("estimated", "measured") or _holds(value, str), "estimated, measured, or names of layers"),
        "units": (value is None or _holds(value, str), "names of modules, or None"),
        "stage_layers": (value is None or _holds(value, int), "a count of blocks for each stage, or None"),
        "precision": (isinstance(value, str), "the name of a precision"),
        "fused_loss": (value == "auto" or isinstance(value, bool), "auto, True or False"),
    }
    is_good, rule = rules[name]
    if not is_good:
        yield Problem(what=f"{name} = {value!r}", rule=f"it is {rule}", fix="leave it out for the default")


def _holds(value: Any, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)


_DEFAULT = Layout()
