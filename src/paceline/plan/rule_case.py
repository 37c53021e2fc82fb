"""What rules of layouts look at, and how they write values; and what each field of a layout may be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from paceline.errors import Problem, did_you_mean
from paceline.mesh import divisors
from paceline.plan import layout as layouts
from paceline.plan.model_shape import ModelShape
from paceline.schedule.grid import Schedule
from paceline.schedule.schedules import CHUNKS

DEFAULT, ANY_MODEL = layouts.Layout(), ModelShape(kind="factory")
DEGREES = ("pipeline", "context_ranks", "tensor")  # with the ranks that share the batch, they make up all


@dataclass(frozen=True, slots=True)
class RuleCase:
    """What a rule looks at: a layout as it was asked for, the ranks if they are known, the model."""

    layout: layouts.Layout
    _: KW_ONLY
    ranks: int | None = None  # None: not known yet
    node_ranks: int | None = None  # of a host; None: all; 0: not known yet
    model: ModelShape = ANY_MODEL
    keys: Mapping[str, str] = field(default_factory=dict)
    strategy: str = ""  # as it was written: zero3 is another name of fsdp

    def key(self, name: str) -> str:
        return self.keys.get(name, name)

    def said(self, *names: str) -> str:
        """Writes fields with their values: ``parallel.pipeline = 2 x parallel.tensor = 4``."""
        values = {name: (name == "strategy" and self.strategy) or getattr(self.layout, name) for name in names}
        return " x ".join(f"{self.key(name)} = {text_of(value)}" for name, value in values.items())

    def unread(self, name: str, owner: str, where: str, instead: str) -> Iterator[Problem]:
        """Yields a problem where a field is changed that nothing reads; ``owner``: what it belongs to."""
        if getattr(self.layout, name) != getattr(DEFAULT, name):
            value = text_of(getattr(self.layout, name))
            yield no_effect(self.key(name), value, f"with {where}", f"it belongs to {owner}", f"set {instead}")

    def problem(self, sentences: str, **values: object) -> Problem:
        """Returns a problem as ``rules.json`` says it, with the values that do not follow from the case itself."""
        case = {"case": self, "layout": self.layout, "model": self.model}
        known = {"key": _Field(self.key), "said": _Field(self.said), **case, **values}
        what, rule, fix = (each.format_map(known) for each in SENTENCES[sentences])
        return Problem(what=what, rule=rule, fix=fix)

    @property
    def degrees(self) -> str:
        return self.said(*(self.split_by or ["pipeline"]))

    @property
    def split_by(self) -> list[str]:
        return [name for name in DEGREES if getattr(self.layout, name) > 1]

    @property
    def divides(self) -> bool:
        """Whether the number of ranks is known, and is one that the degrees divide."""
        return self.ranks is not None and self.ranks % self.layout.degree == 0


class _Field:
    """What a sentence names a field by: ``{key.pipeline}`` has its key, ``{said.pipeline}`` its value besides."""

    def __init__(self, write: Callable[[str], str]) -> None:
        self._write = write

    def __getattr__(self, name: str) -> str:
        return self._write(name)


def no_effect(key: str, value: object, where: str, rule: str, instead: str) -> Problem:
    what, fix = f"{key} = {value} has no effect {where}", f"remove {key}, or {instead}"
    return Problem(what=what, rule=rule, fix=fix, idle_key=key)


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of ``number`` that is nearest to ``wanted``, the larger of two."""
    return min(divisors(number), key=lambda each: (abs(each - wanted), -each))


def named_twice(names: tuple[str, ...]) -> str:
    return next((name for name in sorted(names) if names.count(name) > 1), "")


def text_of(value: object) -> str:
    value = value.parts if isinstance(value, layouts.Offload) else value
    if isinstance(value, tuple):
        return "[" + ", ".join(str(each) for each in value) + "]"
    if value == "estimated":
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


WORDS: dict[str, tuple[str, ...]] = {
    "strategy": layouts.STRATEGIES,
    "algorithm": get_args(layouts.Algorithm),
    "checkpoint_activations": layouts.CHECKPOINTS,
    "buffers": get_args(layouts.Buffers),
    "compile": get_args(layouts.Compile),
    "context_method": get_args(layouts.ContextMethod),
    "schedule": tuple(CHUNKS),
}
"""What fields may be that are one of some words; a schedule may also be one's own."""


def _shipped(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


MEANINGS: dict[str, str] = _shipped("meanings.json")
"""What fields mean that a config and the command line may set, in a sentence each."""

SENTENCES: dict[str, tuple[str, str, str]] = _shipped("rules.json")
"""What problems of ``rules.py`` say: what is wrong, the rule, the fix; with fields of a case in braces."""

FIELDS = {"context": "context_ranks"}
"""Keys of ``parallel`` in a config, and options, that have another name than their field of the layout."""

_AT_LEAST = {  # whole numbers
    **dict.fromkeys(("pipeline", "tensor", "context_ranks", "expert", "microbatch", "accumulate"), 1),
    **dict.fromkeys(("data", "shard_ranks", "node_ranks", "chunks", "prefetch", "mlp_tiles"), 0),
}
_OBJECTS = {
    "offload": (layouts.Offload, "paceline.Offload(optimizer=True)"),
    "compression": (layouts.Compression, 'paceline.Compression(policy="topk")'),
}


def field_problems(layout: layouts.Layout) -> list[Problem]:
    """Lists the fields of a layout whose values are of no use: unknown words, wrong types, numbers out of range."""
    return [problem for each in fields(layout) for problem in _problems(each.name, getattr(layout, each.name))]


def unknown_word(name: str, value: Any, words: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem where a value is none of the words, with the one that is most like it."""
    if value not in words:
        fix = did_you_mean(value.lower() if isinstance(value, str) else str(value), words)
        yield Problem(what=f"{name} = {value!r} is unknown", rule=f"it is one of {', '.join(words)}", fix=fix)


def _problems(name: str, value: Any) -> Iterator[Problem]:
    if name == "schedule" and isinstance(value, str):
        if value not in CHUNKS:
            fix = did_you_mean(value, CHUNKS, "take one of them, or a schedule of your own")
            rule = f"the schedules are {', '.join(CHUNKS)}"
            yield Problem(what=f"there is no schedule {value!r}", rule=rule, fix=fix)
        return
    if name in WORDS and name != "schedule":
        yield from unknown_word(name, value, WORDS[name])
        return
    if name in _AT_LEAST:
        is_good, rule = type(value) is int and value >= _AT_LEAST[name], "a whole number"
        fix = f"give {_AT_LEAST[name]} or more"
    elif name in _OBJECTS:
        kind, example = _OBJECTS[name]
        is_good, rule, fix = isinstance(value, kind), f"a paceline.{kind.__name__}", f"give {example}"
    elif name in ("bucket_mb", "first_bucket_mb", "unit_mb"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        is_good = is_number or (name == "unit_mb" and value is None)
        rule, fix = "a size in MiB", "give a number, 0 or more"
    elif isinstance(getattr(DEFAULT, name), bool) and name != "reshard_after_forward":
        is_good, rule, fix = isinstance(value, bool), "a yes or no", "give True or False"
    else:
        is_estimate, fix = value in ("estimated", "measured"), "leave it out for the default"
        is_good, rule = {
            "reshard_after_forward": (isinstance(value, int), "True, False, or a number of ranks"),
            "schedule": (isinstance(value, Schedule), "the name of a schedule, or a schedule"),
            "stages": (is_estimate or _holds(value, str), "estimated, measured, or names of layers"),
            "units": (value is None or _holds(value, str), "names of modules, or None"),
            "stage_layers": (value is None or _holds(value, int), "a count of blocks for each stage, or None"),
            "precision": (isinstance(value, str), "the name of a precision"),
            "fused_loss": (value == "auto" or isinstance(value, bool), "auto, True or False"),
        }[name]
    if not is_good:
        yield Problem(what=f"{name} = {value!r}", rule=f"it is {rule}", fix=fix)


def _holds(value: Any, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)
