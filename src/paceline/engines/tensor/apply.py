"""Splits the layers of a model in place, by a plan: same modules, same names, and on each rank a part of the tensors.

Everything is checked before anything is changed, and all problems are reported at once. Every rank comes with the same
whole model, in values or on the meta device; of each tensor it keeps its part, in memory of its own, so that the whole
is freed. A parameter stays the object that it was: ties hold, and so does an optimizer that was made before.

A plan is a list of name patterns. A pattern is compared with the last parts of a module's name, part by part, and ``*``
stands for any text within one: ``layers.*.attention.query`` fits ``model.layers.3.attention.query``. A rule gives what
it fits one of these roles:

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
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from paceline.bounded_yaml import load_shipped
from paceline.comm.base import Communicator
from paceline.engines.nodes import TensorRegion
from paceline.engines.tensor.layers import (
    ColumnLinear,
    RowLinear,
    SequencePositions,
    SharedLayer,
    SplitLayer,
    VocabularyEmbedding,
    VocabularyHead,
    causal_loss,
)
from paceline.engines.tensor.layout import Split, TensorLayout
from paceline.errors import UsageError
from paceline.models.head_loss import OutputLayer
from paceline.models.lora import A, Adapted, B, matches, mixed

_KINDS: dict[Role, type[nn.Module]] = {
    "column": ColumnLinear,
    "row": RowLinear,
    "embedding": VocabularyEmbedding,
    "head": VocabularyHead,
    "shared": SharedLayer,
    "between": SharedLayer,
    "positions": SequencePositions,
}


def apply_tensor_parallel(
    model: nn.Module,
    comm: Communicator,
    plan: TensorPlan | None = None,
    *,
    sequence: bool = False,
    gathers_logits: bool = False,
) -> TensorLayout:
    """Splits a model over the ranks of ``comm``, in place; returns where the parts of its tensors belong.

    ``sequence`` splits what lies between the split layers too. The output layer returns ``SplitLogits``, or with
    ``gathers_logits`` whole ones; Hugging Face's causal models take ``labels=`` in either case. Without a plan, the
    ready one that fits is taken. Raises UsageError with all that does not fit.
    """
    plan = plan or plan_for(model)
    changes = [
        _LayerChange(name=name, module=module, rule=rule, splits=dict(_splits(module, rule)))
        for name, module, rule in plan.fitting(model, *_KINDS)
        if sequence or rule.role not in ("between", "positions")  # else what lies between stays as it is
    ]
    problems = [*_plan_problems(model, plan, changes, sequence=sequence), *_fit_problems(model, changes, comm.size)]
    if problems:
        raise UsageError(
            f"{type(model).__name__} cannot be split over {comm.size} tensor ranks by the plan for {plan.name}\n"
            + "\n".join(problems)
        )
    whole = {name: tuple(t.shape) for name, t in _tensors(model)}
    region = TensorRegion(comm, is_sequence=sequence)
    ends = TensorRegion(comm, is_sequence=sequence and all(rule.role != "begin" for rule in plan.rules))
    cut: dict[int, Split] = {}
    for change in changes:
        _cut(change, comm, cut)
        is_end = change.rule.role in ("embedding", "head")
        _convert(change, ends if is_end else region, gathers_logits=gathers_logits)
    _place_hooks(model, plan, region)
    has_head = any(change.rule.role == "head" for change in changes)
    loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    if has_head and not gathers_logits and loss == "ForCausalLMLoss":  # of Hugging Face, from ``labels=``
        cast("Any", model).loss_function = causal_loss
    splits = {name: cut.get(id(tensor), Split(shape=whole[name])) for name, tensor in _tensors(model)}
    return TensorLayout(splits=splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerChange:
    """A layer that is to be changed."""

    name: str
    module: nn.Module
    rule: SplitRule
    splits: dict[str, Split]  # of its own parameters


def _splits(module: nn.Module, rule: SplitRule) -> Iterator[tuple[str, Split]]:
    transposed = _is_transposed(module)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        dim: int | None = None
        if name in (A, B):  # an adapter's: (rank, inputs) and (outputs, rank)
            dim = {("column", B): 0, ("row", A): 1}.get((rule.role, name))
        elif rule.role in ("column", "embedding", "head"):
            dim = parameter.ndim - 1 if transposed else 0
        elif rule.role == "row" and parameter.ndim == 2:
            dim = 0 if transposed else 1
        yield name, Split(shape=tuple(parameter.shape), dim=dim, groups=rule.groups if dim is not None else 1)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is (inputs, outputs): GPT-2's, which is known by its attribute."""
    weight = module._parameters.get("weight")
    return not isinstance(module, nn.Linear) and hasattr(module, "nf") and weight is not None and weight.ndim == 2


def _plan_problems(model: nn.Module, plan: TensorPlan, changes: list[_LayerChange], *, sequence: bool) -> Iterator[str]:
    """Lists what the plan misses: patterns without modules, and parameters that would get a part of their gradient."""
    for pattern in plan.missing(model):
        yield f"  {pattern} fits no module: correct the pattern, or make its rule optional"
    changed = {id(change.module) for change in changes}
    inside = [module for _, module, _ in plan.fitting(model, "input")]
    if sequence:
        begins = [name.rpartition(".")[0] for name, _, _ in plan.fitting(model, "begin")]
        inside += [model.get_submodule(name) for name in begins] or [model]
    partial = {id(module) for each in inside for module in each.modules()}
    split = {id(p) for c in changes for n, p in c.module._parameters.items() if n in c.splits and c.splits[n].dim == 0}
    begun = {id(module) for _, each, _ in plan.fitting(model, "input") for module in each.modules()}
    for change in changes:
        if change.rule.role == "column" and id(change.module) not in begun:
            yield (
                f"  {change.name} is inside no module with the role input, so what it reads would get a part of its "
                "gradient: add a rule with the role input for the module that the split part begins with"
            )
    for name, module in model.named_modules():
        if id(module) in changed:
            continue
        for own, parameter in module._parameters.items():
            if parameter is not None and id(module) in partial:
                yield f"  {name}.{own} works on a part of the stream, and no rule says how: add one for it"
            elif parameter is not None and id(parameter) in split:
                yield f"  {name}.{own} is tied to a parameter that is split: add a rule for {name}"


def _fit_problems(model: nn.Module, changes: list[_LayerChange], size: int) -> Iterator[str]:
    for change in changes:
        role, module = change.rule.role, change.module
        is_plain = type(module).forward in (nn.Linear.forward, OutputLayer.forward, Adapted.forward)
        is_linear = _is_transposed(module) or (isinstance(module, nn.Linear) and is_plain)
        if isinstance(module, SplitLayer | SharedLayer):
            yield f"  {change.name} is split already: apply tensor parallelism once, to a plain model"
        elif role in ("column", "row", "head") and not is_linear:
            yield (
                f"  {change.name} is a {type(module).__name__}, which is no nn.Linear, or has a forward of its own: "
                "leave it out of the plan, or make it a plain linear layer"
            )
        elif role in ("embedding", "positions") and not isinstance(module, nn.Embedding):
            yield f"  {change.name} is a {type(module).__name__}, not an nn.Embedding: leave it out of the plan"
        elif (split := change.splits.get("weight")) is not None and split.dim is not None:
            extent = split.shape[split.dim] // split.groups
            if change.rule.heads is not None:
                above = model.get_submodule(change.name.rpartition(".")[0])
                width = getattr(above, change.rule.heads) * change.rule.head_parts
                heads = extent // width
                good = next(n for n in range(size, 0, -1) if heads % n == 0)
                if good != size:
                    yield (
                        f"  {change.name} has {heads} heads of {width} features, which do not divide by the tensor "
                        f"degree {size}: every rank has the same number of whole heads; try parallel.tensor = {good}"
                    )
            elif extent < size:
                yield f"  {change.name} has {extent} features for {size} ranks: every rank needs one; try fewer"


@torch.no_grad()
def _cut(change: _LayerChange, comm: Communicator, done: dict[int, Split]) -> None:
    """Gives each parameter of a layer this rank's part; one that is tied is cut where it is met first."""
    for name, split in change.splits.items():
        parameter = change.module._parameters[name]
        if parameter is None or id(parameter) in done or split.dim is None:
            continue
        parameter.data = split.cut(parameter.data, comm.rank, comm.size)
        parameter.grad = None
        done[id(parameter)] = split


def _convert(change: _LayerChange, region: TensorRegion, *, gathers_logits: bool) -> None:
    module, is_transposed = change.module, _is_transposed(change.module)
    module.__class__ = mixed(cast("Any", _KINDS[change.rule.role]), cast("Any", type(module)))
    attributes: dict[str, Any] = {"region": region}
    if isinstance(module, SplitLayer):
        attributes["splits"] = {name: split for name, split in change.splits.items() if split.dim is not None}
        attributes["is_transposed"] = is_transposed
    if isinstance(module, VocabularyEmbedding | VocabularyHead):
        attributes["gathers_logits"] = gathers_logits
    vars(module).update(attributes)
    weight = module._parameters.get("weight")
    if weight is None or change.splits["weight"].dim is None:
        return
    # The attributes in which layers of torch keep their sizes.
    outputs, inputs = reversed(weight.shape) if is_transposed else weight.shape
    names = {"out_features": outputs, "nf": outputs, "in_features": inputs, "nx": inputs, "num_embeddings": outputs}
    vars(module).update({name: value for name, value in names.items() if hasattr(module, name)})
    if isinstance(module, VocabularyEmbedding) and module.padding_idx is not None:
        (first, last), padding = module.own_range, module.padding_idx
        module.padding_idx = padding - first if first <= padding < last else None


def _place_hooks(model: nn.Module, plan: TensorPlan, region: TensorRegion) -> None:
    """Lets the stream enter the split parts, and under sequence parallelism be split and joined where the plan says."""
    for _, module, rule in plan.fitting(model, "input"):
        readers = tuple(inner for inner in module.modules() if isinstance(inner, ColumnLinear))
        enter = functools.partial(region.enter_before, readers)
        module.register_forward_pre_hook(functools.partial(_before, enter), with_kwargs=True)
        for name in rule.resized:
            setattr(module, name, getattr(module, name) // region.comm.size)
    if region.is_sequence:
        for _, module, _ in plan.fitting(model, "begin"):
            module.register_forward_pre_hook(functools.partial(_before, region.take), with_kwargs=True)
        for _, module, _ in plan.fitting(model, "end"):
            module.register_forward_hook(lambda _module, _args, output: region.join(output))


def _before(change: Any, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Changes the stream that a module is given: its first argument, or the first tensor given by name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    if name is None:
        raise UsageError(
            f"{type(module).__name__} was called without a tensor\n"
            "  a split part begins with it, and takes the stream as its first argument\n  correct the plan's rule"
        )
    return args, {**kwargs, name: change(kwargs[name])}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


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
