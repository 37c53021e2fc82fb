"""Low-rank adapters: a frozen linear layer, and beside it a product of two thin matrices that learns.

    y = x W^T + scale * dropout(x) A^T B^T        A: rank x inputs, B: outputs x rank, scale = alpha / rank

B begins with zeros, so the model begins as it was. Trained are rank * (inputs + outputs) numbers a layer instead of
inputs * outputs. The layer keeps its class, its names and its weight, and has ``lora_a`` and ``lora_b`` besides. An
export adds the product to the weight. Layers are nn.Linear, and GPT-2's with a weight of (inputs, outputs), which is
known by its attribute ``nf``.

The stacked matrices of experts (experts, outputs, inputs) have an A and a B for each expert, where they are named.
Their module computes with the sums: of all experts of a layer at a time, these are in memory until backward.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.dropout import dropout

A, B = "lora_a", "lora_b"


class Adapted(nn.Module):
    """Mixed into the class of a layer."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x)
        return found + self.added(x, self.lora_a, self.lora_b)

    def added(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.lora_scale * F.linear(F.linear(dropout(x, self.lora_dropout, self.training), a), b)


class StackAdapter(nn.Module):
    """The adapters of one stack of matrices, beside it in its module."""

    def __init__(self, parameter: str, weight: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        (experts, outputs, inputs), device = weight.shape, "cpu" if weight.is_meta else weight.device
        a = torch.empty(experts * rank, inputs, dtype=weight.dtype, device=device)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        b = torch.zeros(experts, outputs, rank, dtype=weight.dtype, device=device)
        self.lora_a, self.lora_b = nn.Parameter(a.view(experts, rank, inputs)), nn.Parameter(b)
        self.parameter, self.lora_scale = parameter, scale


class AdaptedExperts(nn.Module):
    """Mixed into the class of a module with stacks: it computes with the sums under the names of the stacks."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        found = [each for each in self.children() if isinstance(each, StackAdapter)]
        for each in found:
            stack = cast("Tensor", self._parameters[each.parameter])
            vars(self)[each.parameter] = stack + each.lora_scale * (each.lora_b @ each.lora_a).to(stack.dtype)
        try:
            return super().forward(*inputs, **options)
        finally:
            for each in found:
                del vars(self)[each.parameter]


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    trained: Sequence[str] = (),
) -> list[str]:
    """Freezes a model and gives linear layers adapters, in place; returns the layers' names.

    ``targets`` are patterns of the last parts of names, such as ``q_proj`` or ``mlp.*``; without any, every linear
    layer but the output layer and what is trained whole. ``experts`` and ``experts.down_proj`` name stacks of experts.
    ``trained`` are patterns of such parameters, of a new head.
    """
    head = output_layer(model)
    stacks = [each for each in _stacks(model) if any(fits(f"{each[0]}.{each[2]}", pattern) for pattern in targets)]
    layers = {n: m for n, m in model.named_modules() if _sizes(m) is not None and m is not head}
    if not targets:  # what is trained whole needs no adapter
        layers = {n: m for n, m in layers.items() if not any(fits(f"{n}.weight", pattern) for pattern in trained)}
    named = [f"{name}.{stack}" for name, _, stack in stacks]
    lost = [p for p in targets if not any(matches(n, p) for n in layers) and not any(fits(n, p) for n in named)]
    if lost or not layers:
        known = sorted({name.rpartition(".")[2] for name in layers})
        what = f"lora.targets = {list(targets)}: {', '.join(lost) or 'no pattern'} fits no linear layer"
        rule = "adapters are for linear layers and stacks of experts, by the last parts of their names"
        raise UsageError(f"{what}\n  {rule}\n  the model has {', '.join(known) or 'none'}")
    if stacks and dropout:
        rule = "the adapters of experts are added to weights, and what experts read is not at hand there"
        fix = "set lora.dropout = 0, or leave experts out of lora.targets"
        raise UsageError(f"lora.dropout = {dropout} with lora.targets = {list(targets)}\n  {rule}\n  {fix}")
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if any(fits(name, pattern) for pattern in trained):
            parameter.requires_grad_(True)
    chosen: dict[str, Any] = {
        n: m for n, m in layers.items() if not targets or any(matches(n, pattern) for pattern in targets)
    }
    for layer in chosen.values():
        weight, (inputs, outputs) = layer.weight, _sizes(layer) or (0, 0)
        device = "cpu" if weight.is_meta else weight.device
        a = torch.empty(rank, inputs, dtype=weight.dtype, device=device)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        layer.__class__ = mixed(Adapted, cast("Any", type(layer)))
        layer.register_parameter(A, nn.Parameter(a))
        layer.register_parameter(B, nn.Parameter(torch.zeros(outputs, rank, dtype=weight.dtype, device=device)))
        vars(layer).update(lora_scale=alpha / rank, lora_dropout=dropout)
    for _, module, stack in stacks:
        adapter = StackAdapter(stack, cast("Tensor", module._parameters[stack]), rank, alpha / rank)
        module.add_module(f"{stack}_adapter", adapter)
        if not isinstance(module, AdaptedExperts):
            module.__class__ = mixed(AdaptedExperts, cast("Any", type(module)))
    return [*chosen, *named]


def _stacks(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Returns the matrices of experts, (experts, outputs, inputs): their module with its name, and their own."""
    modules = [(n, m) for n, m in model.named_modules() if not getattr(m, "is_transposed", False)]
    return [(n, m, own) for n, m in modules for own, p in m._parameters.items() if p is not None and p.ndim == 3]


def output_layer(model: Any) -> Any:
    """Returns the layer that makes the logits of a model of Hugging Face; None where it says of none."""
    ask = getattr(model, "get_output_embeddings", None)
    return ask() if callable(ask) else None


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, is_transposed: bool) -> Tensor:
    product = scale * (b.double() @ a.double())
    return (weight.double() + (product.t() if is_transposed else product)).to(weight.dtype)


def adapters(parts: Iterable[nn.Module], trained: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the adapted layers of a model's parts by name: scale, dropout, whether the weight is (inputs, outputs).

    Beside them are the parameters among those ``trained`` that are no adapter's. Nothing where there are no adapters.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, module in (pair for part in parts for pair in part.named_modules()):
        if isinstance(module, Adapted):
            is_transposed = not isinstance(module, nn.Linear)
            found[name] = {"scale": module.lora_scale, "dropout": module.lora_dropout, "is_transposed": is_transposed}
        elif isinstance(module, StackAdapter):
            stack = f"{name.rpartition('.')[0]}.{module.parameter}"
            found[name] = {"scale": module.lora_scale, "dropout": 0.0, "is_transposed": False, "stack": stack}
    whole = [name for name in trained if found and not name.endswith((f".{A}", f".{B}"))]
    return found | {name: {"is_whole": True} for name in whole}


def fits(name: str, pattern: str) -> bool:
    """Says whether a parameter's name, or that of its layer, ends with what a pattern says."""
    return matches(name, pattern) or matches(name.rpartition(".")[0], pattern)


def matches(name: str, pattern: str) -> bool:
    """Says whether the last parts of a name are those of a pattern, in which ``*`` stands for text within a part."""
    parts, wanted = name.split("."), pattern.split(".")
    # Backwards: names differ most at their ends.
    return len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, reversed(parts), reversed(wanted)))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(module, Adapted):
        return None
    if isinstance(module, nn.Linear):
        return weight.shape[1], weight.shape[0]
    return (weight.shape[0], weight.shape[1]) if hasattr(module, "nf") else None


@functools.cache
def mixed(kind: Any, own: Any) -> Any:
    """Makes the class that is both; always the same, as compiled code looks at it."""
    return type(f"{kind.__name__}{own.__name__}", (kind, own), {})
