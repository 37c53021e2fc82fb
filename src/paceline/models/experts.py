"""A mixture of experts: MLPs of which each token passes through some, and a router that chooses them.

    scores  = softmax(x R^T)                      float32, over all experts (or a sigmoid for each)
    chosen  = the k best                          of the best groups, where experts stand in groups
    y       = sum of score_e expert_e(x) over the chosen, + shared(x)

Tokens are sorted by their experts, so that each expert multiplies its rows at once; no token is dropped, and none is
padded. The parameters of all experts are stacked: (experts, outputs, inputs). Where ranks hold different experts,
``exchange`` sends the rows to them, and brings back what they make of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.plan.model_shape import ModelShape

Beside = Callable[[], Tensor] | None
Exchange = Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor], Beside], tuple[Tensor, Tensor | None]]
"""Takes rows sorted by their experts, how many each expert of all ranks has, the experts, and what to compute while
rows are under way; returns what the experts make of the rows, and that."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts take each token, (tokens, active), with their weights; ``scores`` are those of all experts."""

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """Chooses the experts of each token, in float32 whatever the rest computes in."""

    def __init__(self, config: ModelShape, std: float) -> None:
        super().__init__()
        self.rule, self.active, self._std = config.router, config.active, std
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)

    def forward(self, tokens: Tensor) -> Routing:
        """Takes tokens (tokens, width)."""
        rule, dtype = self.rule, torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast("cpu" if tokens.is_meta else tokens.device.type, enabled=False):  # meta has no autocast
            logits = F.linear(tokens.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if rule.groups > 1:
            choice = _of_best_groups(choice, rule.groups, rule.active_groups)
        experts = choice.topk(self.active, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if rule.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights * rule.scale, scores, logits)


class Experts(nn.Module):
    """MLPs side by side, each for the rows of the tokens that chose it."""

    def __init__(self, config: ModelShape, std: float, last_std: float) -> None:
        super().__init__()
        width, inner = config.width, config.expert_width or config.mlp_width
        self.gated, self._stds = config.gated, (std, last_std)
        self.first = nn.Parameter(torch.empty(config.experts, (2 if self.gated else 1) * inner, width))
        self.last = nn.Parameter(torch.empty(config.experts, width, inner))
        self.reset_parameters()

    @property
    def cuts(self) -> dict[str, tuple[int, int]]:
        """The dim of each parameter that has the inner features, and how many matrices lie side by side in it."""
        return {"first": (1, 2 if self.gated else 1), "last": (2, 1)}

    def reset_parameters(self) -> None:
        for weight, std in zip((self.first, self.last), self._stds, strict=True):
            nn.init.normal_(weight, std=std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the outputs of rows (rows, width), of which the first counts[0] are those of expert 0, and so on."""
        inner = grouped_product(rows, self.first, counts)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        return grouped_product(inner, self.last, counts)


class Mixture(nn.Module):
    """The experts of a block in the place of its MLP, beside a shared one that every token passes through."""

    exchange: Exchange | None = None

    def __init__(self, config: ModelShape, shared: nn.Module | None, std: float, last_std: float) -> None:
        super().__init__()
        self.num_experts, self.active = config.experts, config.active
        self.router = Router(config, std)
        self.experts = Experts(config, std, last_std)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Returns for each token (..., width) the weighted sum of what its experts make of it."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens)
        chosen = routing.experts.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        rows = _SortedRows.apply(tokens, order, self.active)  # type: ignore[no-untyped-call]
        shared = None if self.shared is None else functools.partial(self.shared, x)
        if self.exchange is None:
            made, beside = self.experts(rows, counts), None if shared is None else shared()
        else:
            made, beside = self.exchange(rows, counts, self.experts, shared)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        made = made.index_select(0, place).view(len(tokens), self.active, x.shape[-1])
        mixed = (made * routing.weights.unsqueeze(-1).to(made.dtype)).sum(1).view(x.shape)
        return mixed if beside is None else cast("Tensor", mixed + beside)


class _SortedRows(torch.autograd.Function):
    """A row for each of a token's experts, in the order of the experts; backward adds in the order of one process."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, active: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.active = active
        return tokens.index_select(0, order // active)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        tokens, width = len(order) // ctx.active, gradient.shape[-1]
        return gradient.index_select(0, place).view(tokens, ctx.active, width).sum(1), None, None


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiplies rows (rows, inputs), sorted by their experts, by each one's weight (experts, outputs, inputs).

    One kernel where torch has it for the dtype and the device; elsewhere a product for each expert.
    """
    kind = rows.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if kind == "meta":
        return F.linear(rows, weights[0])  # without values one expert is as good as many
    if kind == "cuda" and rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(rows, counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def _of_best_groups(scores: Tensor, groups: int, active: int) -> Tensor:
    """Returns scores (tokens, experts) with those of all but the best groups as low as can be."""
    of_groups = scores.view(*scores.shape[:-1], groups, -1)
    best = of_groups.topk(min(2, of_groups.shape[-1]), dim=-1).values.sum(-1).topk(active, dim=-1).indices
    is_in = torch.zeros_like(of_groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return of_groups.masked_fill(~is_in.unsqueeze(-1), -math.inf).flatten(-2)
