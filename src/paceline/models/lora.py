"""Low-rank adapters: a frozen linear layer, and beside it a product of two thin matrices that learns.

    y = x W^T + scale * dropout(x) A^T B^T        A: rank x inputs, B: outputs x rank, scale = alpha / rank

B begins with zeros, so the model begins as it was. Trained are rank * (inputs + outputs) numbers a layer instead of
inputs * outputs. The layer keeps its class, its names and its weight, and has ``lora_a`` and ``lora_b`` besides. An
export adds the product to the weight. Layers are nn.Linear, and GPT-2's with a weight of (inputs, outputs), which is
known by its attribute ``nf``.
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
    layer but the output layer and what is trained whole. ``trained`` are patterns of such parameters, of a new head.
    """
    head = output_layer(model)
    layers = {n: m for n, m in model.named_modules() if _sizes(m) is not None and m is not head}
    if not targets:  # what is trained whole needs no adapter
        layers = {n: m for n, m in layers.items() if not any(fits(f"{n}.weight", pattern) for pattern in trained)}
    lost = [pattern for pattern in targets if not any(matches(name, pattern) for name in layers)]
    if lost or not layers:
        known = sorted({name.rpartition(".")[2] for name in layers})
        what = f"lora.targets = {list(targets)}: {', '.join(lost) or 'no pattern'} fits no linear layer"
        rule = "adapters are for linear layers, by the last parts of their names"
        raise UsageError(f"{what}\n  {rule}\n  the model has {', '.join(known) or 'none'}")
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
    return list(chosen)


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
