"""Splits the layers of a model in place, by a plan: same modules, same names, and on each rank a part of the tensors.

Everything is checked before anything is changed, and all problems are reported at once. Every rank comes with the same
whole model, in values or on the meta device; of each tensor it keeps its part, in memory of its own, so that the whole
is freed. A parameter stays the object that it was: ties hold, and so does an optimizer that was made before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.comm.base import Communicator
from paceline.engines.nodes import TensorRegion
from paceline.engines.tensor import layers
from paceline.engines.tensor.layout import Split, TensorLayout
from paceline.engines.tensor.plans import Role, SplitRule, TensorPlan, library_plan, plan_for
from paceline.errors import UsageError
from paceline.models.head_loss import OutputLayer
from paceline.models.lora import A, Adapted, B, mixed

_KINDS: dict[Role, type[nn.Module]] = {
    "column": layers.ColumnLinear,
    "row": layers.RowLinear,
    "embedding": layers.VocabularyEmbedding,
    "head": layers.VocabularyHead,
    "experts": layers.SplitExperts,
    "partial": layers.PartialLayer,
    "router": layers.SplitRouter,
    "shared": layers.SharedLayer,
    "between": layers.SharedLayer,
    "positions": layers.SequencePositions,
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
    plan, changes = fit_plan(model, comm.size, plan, sequence=sequence)
    for note in plan.notes if comm.rank == 0 else ():
        warnings.warn(note, stacklevel=2)
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
        cast("Any", model).loss_function = layers.causal_loss
    splits = {name: cut.get(id(tensor), Split(shape=whole[name])) for name, tensor in _tensors(model)}
    return TensorLayout(splits=splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerChange:
    """A layer that is to be changed."""

    name: str
    module: nn.Module
    rule: SplitRule
    splits: dict[str, Split]  # of its own parameters


def fit_plan(
    model: nn.Module, size: int, plan: TensorPlan | None = None, *, sequence: bool = False
) -> tuple[TensorPlan, list[_LayerChange]]:
    """Returns how a model is split over ranks; changes nothing. Raises UsageError with all that does not fit."""
    asked, plan = plan, plan or plan_for(model)
    changes, problems = _changes(model, plan, sequence=sequence)
    if problems and asked is None and not sequence and (other := library_plan(model)) is not None:
        plan = other  # names as in a ready plan, and more between them than that knows
        changes, problems = _changes(model, plan, sequence=sequence)
    problems += _fit_problems(model, changes, size)
    if problems:
        raise UsageError(
            f"{type(model).__name__} cannot be split over {size} tensor ranks by the plan for {plan.name}\n"
            + "\n".join(problems)
        )
    return plan, changes


def _changes(model: nn.Module, plan: TensorPlan, *, sequence: bool) -> tuple[list[_LayerChange], list[str]]:
    """Returns the layers that a plan changes, and what it misses."""
    changes = [
        _LayerChange(name=name, module=module, rule=rule, splits=dict(_splits(module, rule)))
        for name, module, rule in plan.fitting(model, *_KINDS)
        if sequence or rule.role not in ("between", "positions")  # else what lies between stays as it is
    ]
    return changes, list(_plan_problems(model, plan, changes, sequence=sequence))


def _splits(module: nn.Module, rule: SplitRule) -> Iterator[tuple[str, Split]]:
    transposed = _is_transposed(module)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        dim: int | None = None
        if cuts := rule.cuts or getattr(module, "cuts", {}):
            dim, groups = cuts[name]
            yield name, Split(shape=tuple(parameter.shape), dim=dim, groups=groups)
            continue
        if name in (A, B):  # an adapter's: (rank, inputs) and (outputs, rank)
            dim = {("column", B): 0, ("row", A): 1}.get((rule.role, name))
        elif rule.role in ("column", "embedding", "head"):
            dim = parameter.ndim - 1 if transposed else 0
        elif rule.role in ("row", "partial") and parameter.ndim == 2:
            dim = 0 if transposed else 1
        yield name, Split(shape=tuple(parameter.shape), dim=dim, groups=rule.groups if dim is not None else 1)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is (inputs, outputs): GPT-2's, which is known by its attribute."""
    weight = module._parameters.get("weight")
    return not isinstance(module, nn.Linear) and hasattr(module, "nf") and weight is not None and weight.ndim == 2


def _plan_problems(model: nn.Module, plan: TensorPlan, changes: list[_LayerChange], *, sequence: bool) -> Iterator[str]:
    """Lists what the plan misses: patterns without modules, and parameters that would get a part of their gradient."""
    if sequence and not plan.splits_sequence:
        yield "  it does not say what lies between the split layers: set parallel.sequence_parallel = false"
        return
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
        width = getattr(model.get_submodule(change.name.rpartition(".")[0]), "head_dim", None)
        is_whole = change.rule.role == "shared" and all(split.dim is None for split in change.splits.values())
        if is_whole and any(p.shape[-1] != width for p in change.module.parameters()) and width:
            yield f"  {change.name} works on all heads together, of which a rank has some: leave them whole"
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
        if isinstance(module, layers.SplitLayer | layers.SharedLayer):
            yield f"  {change.name} is split already: apply tensor parallelism once, to a plain model"
        elif role in ("column", "row", "head", "partial") and not (is_linear or hasattr(module, "cuts")):
            yield (
                f"  {change.name} is a {type(module).__name__}, which is no nn.Linear, or has a forward of its own: "
                "leave it out of the plan, or make it a plain linear layer"
            )
        elif role in ("embedding", "positions") and not isinstance(module, nn.Embedding):
            yield f"  {change.name} is a {type(module).__name__}, not an nn.Embedding: leave it out of the plan"
        elif (split := next((each for each in change.splits.values() if each.dim is not None), None)) is not None:
            extent = split.shape[cast("int", split.dim)] // split.groups
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
    is_cut_norm = change.rule.role == "shared" and any(split.dim is not None for split in change.splits.values())
    kind = layers.SplitNorm if is_cut_norm else _KINDS[change.rule.role]
    module.__class__ = mixed(cast("Any", kind), cast("Any", type(module)))
    attributes: dict[str, Any] = {"region": region}
    if isinstance(module, layers.SplitLayer):
        attributes["splits"] = {name: split for name, split in change.splits.items() if split.dim is not None}
        attributes["is_transposed"] = is_transposed
        attributes["is_whole"] = change.rule.is_whole
    if isinstance(module, layers.VocabularyEmbedding | layers.VocabularyHead):
        attributes["gathers_logits"] = gathers_logits
    vars(module).update(attributes)
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or change.splits["weight"].dim is None:
        return
    # The attributes in which layers of torch keep their sizes.
    outputs, inputs = reversed(weight.shape) if is_transposed else weight.shape
    names = {"out_features": outputs, "nf": outputs, "in_features": inputs, "nx": inputs, "num_embeddings": outputs}
    vars(module).update({name: value for name, value in names.items() if hasattr(module, name)})
    if isinstance(module, layers.VocabularyEmbedding) and module.padding_idx is not None:
        (first, last), padding = module.own_range, module.padding_idx
        module.padding_idx = padding - first if first <= padding < last else None


def _place_hooks(model: nn.Module, plan: TensorPlan, region: TensorRegion) -> None:
    """Lets the stream enter the split parts, and under sequence parallelism be split and joined where the plan says."""
    for _, module, rule in plan.fitting(model, "input"):
        readers = tuple(inner for inner in module.modules() if isinstance(inner, layers.ColumnLinear))
        enter = functools.partial(region.enter_before, readers)
        module.register_forward_pre_hook(functools.partial(_before, enter), with_kwargs=True)
        for name in rule.resized:
            setattr(module, name, getattr(module, name) // region.comm.size)
    for name, _, _ in plan.fitting(model, "router"):  # behind a mixture, whose parts are summed once
        mixture = model.get_submodule(name.rpartition(".")[0])
        mixture.register_forward_hook(lambda _module, _args, output: region.leave(output))
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
