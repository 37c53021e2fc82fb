"""Plans: which layers of a model are split, and how; ready ones, and those that a model's own library has.

A plan is a list of name patterns. A pattern is compared with the last parts of a module's name, part by part, and ``*``
stands for any text within one: ``layers.*.attention.query`` fits ``model.layers.3.attention.query``. A rule gives what
it fits one of these roles:

    input      a split part begins here: the module's first argument is the whole stream
    column     a linear layer with some of the outputs       row        one with some of the inputs: a split part ends
    shared     whole parameters inside a split part, that work on some of the heads; a norm of all heads is cut
    experts    some of the inner features of every expert, in matrices that are stacked: a split part of its own
    partial    as row, or such experts, where the module above adds up before the sum     router     of that module
    embedding  has some rows of the vocabulary               head       the output layer, with the same rows
    between    whole parameters between split parts, that work on a part of the sequence under sequence parallelism
    positions  an embedding of positions, between split parts
    begin      before this module the sequence is whole, under sequence parallelism      end   behind it again

A plan without begin and end splits the sequence from the embedding to the output layer. A model whose code between
looks at the sequence's length has them around its blocks, and pays one all-reduce and one all-gather more in a step.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from torch import nn

from paceline.bounded_yaml import load_shipped
from paceline.errors import UsageError
from paceline.models.lora import matches

Role = (
    Literal["input", "column", "row", "shared", "experts", "partial", "router"]
    | Literal["embedding", "head", "between", "positions", "begin", "end"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """What becomes of the modules that a pattern fits."""

    pattern: str
    role: Role
    heads: str | None = None  # split between heads: the attribute of the module above that says how wide one is
    groups: int = 1  # matrices that lie side by side in the weight, each of them split
    head_parts: int = 1  # matrices of which each head has its rows side by side, so that heads are that much wider
    resized: tuple[str, ...] = ()  # attributes that count what is split: a rank's are its share
    is_whole: bool = False  # what a column layer returns, and what a row layer reads, is whole on every rank
    cuts: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of experts: each parameter's dim and groups
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Rules for a family of models. Of the rules for layers, the first that fits a module counts."""

    name: str
    rules: tuple[SplitRule, ...]
    splits_sequence: bool = True  # it says what lies between the split parts
    notes: tuple[str, ...] = ()  # what a user should know of it

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
    """Returns the ready plan that fits a model, else that of its library. Raises UsageError if there is none."""
    lacks = [(plan.missing(model), plan) for plan in ready_plans().values()]
    missing, plan = min(lacks, key=lambda row: len(row[0]) / len(row[1].rules))
    if not missing:
        return plan
    if (found := library_plan(model)) is not None:
        return found
    raise UsageError(
        f"there is no tensor-parallel plan for {type(model).__name__}: the nearest is {plan.name!r}, and "
        f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''} fit none of its modules\n"
        f"  a plan says by name which layers are split; ready are those for {', '.join(ready_plans())}, and a model "
        "of transformers may have one of its own\n"
        "  give a TensorPlan with a rule for each linear layer inside its blocks, or set parallel.tensor = 1"
    )


@functools.cache
def ready_plans() -> dict[str, TensorPlan]:
    """Returns the plans of ``plans.yaml`` by name."""
    found = load_shipped((Path(__file__).parent / "plans.yaml").read_text())
    rules = {name: tuple(rule for row in rows for rule in _rules(**row)) for name, rows in found.items()}
    return {name: TensorPlan(name=name, rules=each) for name, each in rules.items()}


def _rules(
    prefix: str = "",
    width: str = "head_dim",
    groups: int = 1,
    head_parts: int = 1,
    resized: Sequence[str] = (),
    **names: str,
) -> Iterator[SplitRule]:
    """Makes rules from a text of names for each role; ``?``: some models lack it; ``heads``: cut between heads."""
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


# What Hugging Face's library says of its architectures, in our roles. Each of its styles is a role, and whether what
# lies between the column and the row layers is whole on every rank.
_STYLES: dict[str, tuple[Role, bool]] = {
    "colwise": ("column", False),
    "rowwise": ("row", False),
    "replicated_with_grad_allreduce": ("shared", False),
    "colwise_gather_output": ("column", True),
    "rowwise_split_input": ("row", True),
    "colwise_rep": ("column", True),  # the names of the two before release 5
    "rowwise_rep": ("row", True),
}
_EXPERTS = "moe_tp_experts"
_CUTS = {"packed_colwise": (1, 2), "colwise": (1, 1), "rowwise": (2, 1)}  # of an expert's (experts, outputs, inputs)


def library_plan(model: nn.Module) -> TensorPlan | None:
    """Returns the plan that a model of transformers brings along; None without one that splits anything.

    The stream enters at each column layer, so it is right whatever the code above does. Modules whose layers are not
    known to make up a whole split part stay as they are, which is right too, and are told of in the plan's notes.
    """
    styles = getattr(model, "_tp_plan", None)
    if not isinstance(styles, Mapping):
        return None
    ends = list(_vocabulary_rules(model))
    parts: dict[str, tuple[dict[str, str], list[nn.Module]]] = {}  # by the name of the module above its layers
    modules = dict(model.named_modules())
    for name in modules.keys() - {rule.pattern for rule in ends}:
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if (style := styles.get(general)) is not None:
            is_above = style != _EXPERTS
            members, above = parts.setdefault(general.rpartition(".")[0] if is_above else general, ({}, []))
            members[general] = style
            above.append(modules[name.rpartition(".")[0] if is_above else name])
    rules, notes = ends, list[str]()
    for name, (members, above) in parts.items():
        try:
            is_experts = members.get(name) == _EXPERTS
            rules += _experts(name, above, styles) if is_experts else _linear_layers(members, above)
        except _NotSplitError as reason:
            notes.append(
                f"{name} stays whole on every tensor rank: {reason}\n"
                f"  the library's plan for {type(model).__name__} splits it, and not all of that is known here\n"
                "  give a TensorPlan with rules for it to save its memory and time"
            )
    if not any(rule.role in ("column", "experts") for rule in rules):
        return None
    name = f"{type(model).__name__} of its library"
    return TensorPlan(name=name, rules=tuple(rules), splits_sequence=False, notes=tuple(notes))


class _NotSplitError(Exception):
    """Why a part of a library's plan is left out."""


def _vocabulary_rules(model: nn.Module) -> Iterator[SplitRule]:
    """Yields rules for the embedding and the output layer, of which ranks have rows as in every plan of ours."""
    ends: dict[int, Role] = {}
    for method, role in (("get_input_embeddings", "embedding"), ("get_output_embeddings", "head")):
        with contextlib.suppress(AttributeError, NotImplementedError):  # some have none
            layer = getattr(model, method)()
            if isinstance(layer, nn.Embedding if role == "embedding" else nn.Linear):
                ends[id(layer)] = cast("Role", role)
    for name, module in model.named_modules():
        if id(module) in ends:
            yield SplitRule(pattern=name, role=ends[id(module)])


def _linear_layers(members: Mapping[str, str], above: Sequence[nn.Module]) -> Iterator[SplitRule]:
    """Yields the rules for the layers of a split part, which lie side by side in the modules ``above``."""
    unknown = [style for style in members.values() if style not in _STYLES]
    if unknown:
        raise _NotSplitError(f"it has a layer of the style {unknown[0]!r}")
    kinds = {name: _STYLES[style] for name, style in members.items()}
    found = set(kinds.values())
    is_whole = ("column", True) in found
    if found - {("shared", False)} != {("column", is_whole), ("row", is_whole)} or (is_whole and len(found) > 2):
        raise _NotSplitError("column and row layers in it do not belong together")
    names = {name.rpartition(".")[2] for name in members}
    others = [name for each in above for name, _ in each.named_parameters() if name.partition(".")[0] not in names]
    if others and not is_whole:
        raise _NotSplitError(f"the plan says nothing of its {others[0]}, which may work on a part of the heads")
    has_heads = all(isinstance(getattr(each, "head_dim", None), int) for each in above)
    if not has_heads and any("attention" in type(each).__name__.lower() for each in above) and not is_whole:
        raise _NotSplitError("it does not say how wide a head is, in head_dim")
    for name, (role, _) in kinds.items():
        if role == "column":
            yield SplitRule(pattern=name, role="input")
        heads = "head_dim" if has_heads and role == "column" and not is_whole else None
        yield SplitRule(pattern=name, role=role, heads=heads, is_whole=is_whole)


def _experts(name: str, modules: Sequence[nn.Module], styles: Mapping[str, str]) -> Iterator[SplitRule]:
    """Yields the rule for experts whose matrices are stacked: what one gives per inner feature, another reads."""
    parameters = dict(modules[0].named_parameters())
    cuts = {own: _CUTS.get(styles.get(f"{name}.{own}", ""), (0, 1)) for own in parameters}
    inner = {own: each.shape[cuts[own][0]] // cuts[own][1] for own, each in parameters.items()}
    if any(each.ndim != 3 or cuts[own][0] == 0 for own, each in parameters.items()) or len(set(inner.values())) != 1:
        raise _NotSplitError(
            f"its {', '.join(parameters)} are not stacks of matrices that fit together as the plan says"
        )
    yield SplitRule(pattern=name, role="experts", cuts=cuts)
