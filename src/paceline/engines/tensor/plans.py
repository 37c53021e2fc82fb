"""Which layers of a model are split, and how: a plan of name patterns, as data.

A pattern is compared with the last parts of a module's name, part by part, and ``*`` stands for any text within one:
``layers.*.attention.query`` fits ``model.layers.3.attention.query``. A rule gives what it fits one of these roles:

    input      a split part begins here: the module's first argument is the whole stream
    column     a linear layer with some of the outputs       row        one with some of the inputs: a split part ends
    shared     whole parameters inside a split part, that work on some of the heads
    embedding  has some rows of the vocabulary               head       the output layer, with the same rows
    between    whole parameters between split parts, that work on a part of the sequence under sequence parallelism
    positions  an embedding of positions, between split parts
    begin      before this module the sequence is whole, under sequence parallelism      end   behind it again

A plan without begin and end splits the sequence from the embedding to the output layer. A model whose code between
looks at the sequence's length has them around its blocks, and pays one all-reduce and one all-gather more in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from torch import nn

from paceline.bounded_yaml import load_shipped
from paceline.errors import UsageError
from paceline.models.lora import matches

Role = Literal["input", "column", "row", "shared", "embedding", "head", "between", "positions", "begin", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """What becomes of the modules that a pattern fits."""

    pattern: str
    role: Role
    heads: str | None = None  # split between heads: the attribute of the module above that says how wide one is
    groups: int = 1  # matrices that lie side by side in the weight, each of them split
    head_parts: int = 1  # matrices of which each head has its rows side by side, so that heads are that much wider
    resized: tuple[str, ...] = ()  # attributes that count what is split: a rank's are its share
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Rules for a family of models. Of the rules for layers, the first that fits a module counts."""

    name: str
    rules: tuple[SplitRule, ...]

    def fitting(self, model: nn.Module, *roles: Role) -> Iterator[tuple[str, nn.Module, SplitRule]]:
        """Iterates over the modules of these roles, with their names and rules."""
        rules = [rule for rule in self.rules if rule.role in roles]
        for name, module in model.named_modules():
            found = next((rule for rule in rules if matches(name, rule.pattern)), None)
            if found is not None:
                yield name, module, found

    def missing(self, model: nn.Module) -> list[str]:
        """Returns the patterns that fit no module, and are not optional."""
        names = [name for name, _ in model.named_modules()]
        return [
            rule.pattern
            for rule in self.rules
            if not rule.is_optional and not any(matches(name, rule.pattern) for name in names)
        ]


def plan_for(model: nn.Module) -> TensorPlan:
    """Returns the ready plan that fits a model. Raises UsageError that says what the nearest lacks."""
    lacks = [(plan.missing(model), plan) for plan in ready_plans().values()]
    missing, plan = min(lacks, key=lambda row: len(row[0]) / len(row[1].rules))
    if not missing:
        return plan
    raise UsageError(
        f"there is no tensor-parallel plan for {type(model).__name__}: the nearest is {plan.name!r}, and "
        f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''} fit none of its modules\n"
        f"  a plan says by name which layers are split; ready are those for {', '.join(ready_plans())}\n"
        "  give a TensorPlan with a rule for each linear layer inside its blocks, or set parallel.tensor = 1"
    )


@functools.cache
def ready_plans() -> dict[str, TensorPlan]:
    """Returns the plans of ``plans.yaml`` by name."""
    found = load_shipped((Path(__file__).parent / "plans.yaml").read_text())
    return {
        name: TensorPlan(name=name, rules=tuple(rule for row in rows for rule in _rules(**row)))
        for name, rows in found.items()
    }


def _rules(
    prefix: str = "",
    width: str = "head_dim",
    groups: int = 1,
    head_parts: int = 1,
    resized: Sequence[str] = (),
    **names: str,
) -> Iterator[SplitRule]:
    """Makes rules from the names of each role, written as one text; ``?`` marks what some models lack.

    ``heads`` are column layers that are split between heads.
    """
    for role, text in names.items():
        for name in text.split():
            yield SplitRule(
                pattern=prefix + name.rstrip("?"),
                role="column" if role == "heads" else cast("Role", role),
                heads=width if role == "heads" else None,
                groups=groups,
                head_parts=head_parts,
                resized=tuple(resized),
                is_optional=name.endswith("?"),
            )
