"""A mixture of experts: MLPs of which each token passes through some, and a router that chooses them.

    scores  = softmax(x R^T)                      float32, over all experts (or a sigmoid for each)
    chosen  = the k best                          of the best groups, where experts stand in groups
    y       = sum of score_e expert_e(x) over the chosen, + shared(x)

Tokens are sorted by their experts, so that each expert multiplies its rows at once; none is padded, and none is dropped
but by an expert with a capacity, in training. The parameters of all experts are stacked: (experts, outputs, inputs).
Where ranks hold different experts, ``exchange`` sends the rows to them, and brings back what they make of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.balance import Balanced, Choice, look_at
from paceline.models.expert_rows import collect, gate, spread
from paceline.plan.model_shape import ModelShape

Beside = Callable[[], Tensor] | None
Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # as ``grouped_product``
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


class Router(Balanced):
    """Chooses the experts of each token, in float32 whatever the rest computes in."""

    def __init__(self, config: ModelShape, std: float) -> None:
        super().__init__(config.router, config.experts)
        self.active, self._std = config.active, std
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.weight, std=self._std)

    def forward(self, tokens: Tensor) -> Routing:
        """Takes tokens (tokens, width)."""
        rule, dtype = self.rule, torch.promote_types(tokens.dtype, torch.float32)
        with contextlib.nullcontext() if tokens.is_meta else torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if self.bias is not None:  # which chooses, and weighs nothing
            choice = choice + self.bias
        if rule.groups > 1:
            choice = _of_best_groups(choice, rule.groups, rule.active_groups)
        experts = choice.topk(self.active, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if rule.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights * rule.scale, scores, logits)


class Experts(nn.Module):
    """MLPs side by side, each for the rows of the tokens that chose it."""

    float8: Product | None = None  # what multiplies instead, with operands of 8 bits

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
        product = self.float8 or grouped_product
        inner = product(rows, self.first, counts)
        inner = gate(inner) if self.gated else F.gelu(inner, approximate="tanh")
        return product(inner, self.last, counts)


class Mixture(nn.Module):
    """The experts of a block in the place of its MLP, beside a shared one that every token passes through."""

    exchange: Exchange | None = None

    def __init__(self, config: ModelShape, shared: nn.Module | None, std: float, last_std: float) -> None:
        super().__init__()
        self.num_experts, self.active = config.experts, config.active
        self.router = Router(config, std)
        self.experts = Experts(config, std, last_std)
        self.shared = shared

    @property
    def load(self) -> Tensor:
        """How many choices fell on each expert in training, since ``take_loads``; ``dropped`` likewise."""
        return self.router.load

    @property
    def dropped(self) -> Tensor:
        return self.router.dropped

    def forward(self, x: Tensor) -> Tensor:
        """Returns for each token (..., tokens, width) the weighted sum of what its experts make of it."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens)
        capacity = self.router.rule.capacity if self.training else 0.0
        is_watched = self.training and torch.is_grad_enabled()
        choice, rows = None, (x.shape[:-2].numel(), x.shape[-2])
        if capacity or is_watched:
            choice = look_at(routing.experts.view(*rows, self.active), self.num_experts, capacity)
        mixed = self._mix(x, tokens, routing, choice)
        if choice is not None and is_watched:
            mixed = self.router.watch(mixed, routing.logits.view(*rows, self.num_experts), choice)
        return mixed

    def _mix(self, x: Tensor, tokens: Tensor, routing: Routing, choice: Choice | None) -> Tensor:
        """Returns what the experts make of x, whose tokens lie one behind another, weighed and added up."""
        chosen, kept = routing.experts.reshape(-1), None
        if choice is not None and choice.kept is not None:
            kept = choice.kept.reshape(-1)
            chosen = torch.where(kept, chosen, self.num_experts)  # behind all others, where no expert looks
        order = chosen.argsort(stable=True)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:-1]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = spread(tokens, order, place, self.active, kept)
        shared = None if self.shared is None else functools.partial(self.shared, x)
        if self.exchange is None:
            made, beside = self.experts(rows, counts), None if shared is None else shared()
        else:  # what is dropped stays here
            sent = rows if kept is None else rows[: int(counts.sum())]
            made, beside = self.exchange(sent, counts, self.experts, shared)
            made = F.pad(made, (0, 0, 0, len(rows) - len(sent)))
        mixed = collect(made, order, place, routing.weights, kept).view(x.shape)
        return mixed if beside is None else cast("Tensor", mixed + beside)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiplies rows (rows, inputs), sorted by their experts, by each one's weight (experts, outputs, inputs).

    One kernel where torch has it for the dtype and the device; elsewhere a product for each expert. Rows behind those
    of the last expert become anything.
    """
    kind = rows.device.type
    if kind == "meta":  # as if each expert had as many rows
        each = -(-len(rows) // len(weights))
        even = F.pad(rows, (0, 0, 0, each * len(weights) - len(rows))) if len(rows) % len(weights) else rows
        product = torch.bmm(even.view(len(weights), each, rows.shape[1]), weights.transpose(1, 2))
        return product.flatten(0, 1)[: len(rows)]
    is_aligned = _is_aligned(weights)
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        rows, weights = rows.to(dtype), weights.to(dtype)
    is_half = rows.dtype == weights.dtype == torch.bfloat16
    goes_on_aligned = all(size % 8 == 0 for size in weights.shape[1:])  # rows of both, by multiples of 16 bytes
    if kind == "cuda" and is_aligned and is_half and goes_on_aligned and len(rows) > 0:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    *parts, rest = torch.split(rows, [*sizes, len(rows) - sum(sizes)])
    made = [F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)]
    return torch.cat([*made, rest.new_zeros(len(rest), weights.shape[1])])


def grouped_sums(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Returns for each expert the sum over its rows of left (rows, outputs) times right (rows, inputs)."""
    if left.is_meta:
        each = -(-len(left) // len(counts))
        pad = (0, 0, 0, each * len(counts) - len(left))
        left, right = (F.pad(x, pad).view(len(counts), each, -1) for x in (left, right))
        return torch.bmm(left.transpose(1, 2), right)
    if left.device.type == "cuda":
        return F.grouped_mm(left.t(), right, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    lefts, rights = (torch.split(x[: sum(sizes)], sizes) for x in (left, right))
    return torch.stack([one.t() @ other for one, other in zip(lefts, rights, strict=True)])


def _is_aligned(weights: Tensor) -> bool:
    """Says whether a parameter begins at a multiple of 16 bytes, as torch's kernel wants it; no graph can hold that."""
    return weights.storage_offset() * weights.element_size() % 16 == 0


# What torch.compiler.assume_constant_result does, which would load the compiler with this file.
vars(_is_aligned)["_dynamo_marked_constant"] = True


def _of_best_groups(scores: Tensor, groups: int, active: int) -> Tensor:
    """Returns scores (tokens, experts) with those of all but the best groups as low as can be."""
    of_groups = scores.view(*scores.shape[:-1], groups, -1)
    best = of_groups.topk(min(2, of_groups.shape[-1]), dim=-1).values.sum(-1).topk(active, dim=-1).indices
    is_in = torch.zeros_like(of_groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return of_groups.masked_fill(~is_in.unsqueeze(-1), -math.inf).flatten(-2)
