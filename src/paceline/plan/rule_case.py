"""What a rule of layouts looks at, and how it writes values: the layout as it was asked for, the ranks, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from paceline.errors import Problem
from paceline.mesh import divisors
from paceline.plan.layout import Layout, Offload
from paceline.plan.model_shape import ModelShape

DEFAULT = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCase:
    """What a rule looks at: a layout as it was asked for, the ranks if they are known, the model."""

    layout: Layout
    ranks: int | None
    node_ranks: int | None
    model: ModelShape
    keys: Mapping[str, str]
    strategy: str  # as it was written: zero3 is another name of fsdp

    def key(self, name: str) -> str:
        return self.keys.get(name, "") + name

    def said(self, *names: str) -> str:
        """Writes fields with their values: ``parallel.pipeline = 2 x parallel.tensor = 4``."""
        values = {name: self.strategy if name == "strategy" else getattr(self.layout, name) for name in names}
        return " x ".join(f"{self.key(name)} = {text_of(value)}" for name, value in values.items())

    def unread(self, name: str, owner: str, where: str, instead: str) -> Iterator[Problem]:
        """Yields a problem where a field is changed that nothing reads; ``owner``: what it belongs to."""
        if getattr(self.layout, name) != getattr(DEFAULT, name):
            value = text_of(getattr(self.layout, name))
            yield no_effect(self.key(name), value, f"with {where}", f"it belongs to {owner}", f"set {instead}")

    @property
    def degrees(self) -> str:
        split = [name for name in ("pipeline", "tensor") if getattr(self.layout, name) > 1]
        return self.said(*(split or ["pipeline"]))

    @property
    def parts(self) -> int:
        """Into how many parts a copy of the model is split."""
        return self.layout.pipeline * self.layout.tensor

    @property
    def divides(self) -> bool:
        """Whether the number of ranks is known, and is one that the degrees divide."""
        return self.ranks is not None and self.ranks % self.parts == 0


Find = Callable[[RuleCase], Iterator[Problem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule, and the fields that it reads; ``model`` stands for the facts of the model."""

    reads: tuple[str, ...]
    find: Find


def no_effect(key: str, value: object, where: str, rule: str, instead: str) -> Problem:
    """Returns the problem of a key that nothing reads."""
    what, fix = f"{key} = {value} has no effect {where}", f"remove {key}, or {instead}"
    return Problem(what=what, rule=rule, fix=fix, idle_key=key)


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of ``number`` that is nearest to ``wanted``, the larger of two."""
    return min(divisors(number), key=lambda each: (abs(each - wanted), -each))


def named_twice(names: tuple[str, ...]) -> str:
    """Returns a name that stands twice; empty: none does."""
    return next((name for name in sorted(names) if names.count(name) > 1), "")


def text_of(value: object) -> str:
    """Writes a value as a config has it."""
    value = value.parts if isinstance(value, Offload) else value
    if isinstance(value, tuple):
        return "[" + ", ".join(str(each) for each in value) + "]"
    if value == "estimated":
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)
