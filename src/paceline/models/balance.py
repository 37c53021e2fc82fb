"""What keeps experts evenly busy: penalties of the router, a bias of its choice, and how many tokens an expert takes.

Of a row of n tokens with k experts each, among E, let f_e be the share of its n k choices that fell on expert e, and
p_te the score of expert e for token t, which add up to 1 over the experts. The loss summed over targets gains

    weight * n * E sum_e f_e mean_t p_te  =  weight * E sum_t sum_e f_e p_te        for each row: the auxiliary loss
    weight_z * sum_t logsumexp(logits_t)^2                                          the z-loss

before it is divided by their number. These are sums over tokens, like the loss, so they are the same however a batch is
cut; of a row that several ranks share, they exchange what was chosen.

[Note: penalties] The loss does not contain them: the gradient of a layer's output passes through a node that gives the
logits theirs, times the factor that the summed loss is multiplied with. ``loss_factor`` says which that is. A node runs
backward once, however often forward ran for it, so that it also counts what the router chose.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.attention import current_part
from paceline.plan.model_shape import RouterRule

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What a router did on this rank in training since it was last asked; sums are over tokens."""

    choices: Tensor  # (experts,): how many fell on each, whether it took them or not
    dropped: Tensor  # (experts,): of these, how many were beyond its capacity
    entropy: Tensor  # of the scores, in nats, summed
    auxiliary: Tensor  # the auxiliary loss without its weight, summed; 1 for each token where experts are chosen evenly
    z: Tensor  # the z-loss without its weight, summed


class Balanced(nn.Module):
    """The part of a router that counts, and that moves the bias of its choice."""

    load: Tensor
    dropped: Tensor
    sums: Tensor
    arrived: Tensor
    bias: Tensor | None
    factor: Tensor | None = None  # of the summed loss; None: one over the tokens of a call

    def __init__(self, rule: RouterRule, experts: int) -> None:
        super().__init__()
        self.rule = rule
        for name in ("load", "dropped", "arrived"):  # the last one: choices since the last update
            self.register_buffer(name, torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("sums", torch.zeros(3), persistent=False)
        self.register_buffer("bias", torch.zeros(experts) if rule.balance == "bias" else None)

    def reset_parameters(self) -> None:
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keeps sums and the bias in float32 where the model is cast to 16 bits: small steps would be lost."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype in _HALF:
                self._buffers[name] = before[name].to(buffer.device)  # type: ignore[union-attr]
        return self

    @torch.no_grad()
    def move_bias(self, arrived: Tensor, norm: Tensor | None = None) -> None:
        """Moves each expert's bias, if it has one, by what arrived on all ranks, unless a norm is not finite."""
        if self.bias is not None:
            too_few = (arrived.sum() - arrived * len(arrived)).sign()
            step = too_few.to(self.bias.dtype) * self.rule.balance_weight
            self.bias += step if norm is None else torch.where(norm.isfinite(), step, 0.0)
        self.arrived.zero_()

    def watch(self, out: Tensor, logits: Tensor, choice: Choice) -> Tensor:
        """Returns a layer's output, whose gradient brings the logits (rows, tokens, experts) theirs.

        See [Note: penalties].
        """
        num_tokens = max(1, logits.shape[0] * logits.shape[1])
        factor = logits.new_full((), 1 / num_tokens) if self.factor is None else self.factor.to(logits)
        watched: Tensor = _Watched.apply(out, logits, factor, choice.shares, choice.counts, choice.dropped, self)  # type: ignore[no-untyped-call]
        return watched


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen in some rows: ``kept`` as the experts, or None: all; shares (rows, experts) are of whole rows."""

    kept: Tensor | None
    counts: Tensor
    dropped: Tensor
    shares: Tensor


def look_at(experts: Tensor, num_experts: int, capacity: float) -> Choice:
    """Looks at the experts that were chosen, (rows, tokens, active); ``capacity`` 0: they take all."""
    part = current_part()
    whole = experts if part is None else part.join(experts)
    of_rows = count_choices(whole, num_experts)
    counts = of_rows.sum(0) if part is None else count_choices(experts, num_experts).sum(0)
    kept, dropped = None, torch.zeros_like(counts)
    if capacity:
        kept = within_capacity(whole, of_rows, capacity)
        kept = kept if part is None else part.cut(kept)
        dropped.scatter_add_(0, experts.flatten(), (~kept).flatten().to(dropped.dtype))
    return Choice(kept, counts, dropped, of_rows.double() / whole.shape[1:].numel())


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Returns how many choices of each row fell on each expert, (rows, experts)."""
    chosen = experts.flatten(1)
    counts = chosen.new_zeros(len(chosen), num_experts)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen))


def within_capacity(experts: Tensor, counts: Tensor, capacity: float) -> Tensor:
    """Says which choices (rows, tokens, active) are among the first of their row at an expert, as many as it takes."""
    chosen, num_experts = experts.flatten(1), counts.shape[1]
    most = math.ceil(capacity * chosen.shape[1] / num_experts)
    order = chosen.argsort(dim=1, stable=True)
    firsts = (counts.cumsum(1) - counts).gather(1, chosen.gather(1, order))
    places = torch.arange(chosen.shape[1], device=chosen.device) - firsts
    return (torch.empty_like(places).scatter_(1, order, places) < most).view_as(experts)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        logits: Tensor,
        factor: Tensor,
        shares: Tensor,
        counts: Tensor,
        dropped: Tensor,
        router: Balanced,
    ) -> Tensor:
        ctx.save_for_backward(logits, factor, shares, counts, dropped)
        ctx.router = router
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, factor, shares, counts, dropped = ctx.saved_tensors
        router: Balanced = ctx.router
        rule, is_softmax = router.rule, router.rule.scores == "softmax"
        each = logits.softmax(-1) if is_softmax else logits.sigmoid()
        scores = each if is_softmax else each / each.sum(-1, keepdim=True)
        # By token, what a score costs: E f_e of its row.
        costs = (shares * shares.shape[1]).to(logits).unsqueeze(1)
        auxiliary = (costs * scores).sum(-1, keepdim=True)
        z = logits.logsumexp(-1, keepdim=True)
        router.load.add_(counts)
        router.arrived.add_(counts)
        router.dropped.add_(dropped)
        entropy = torch.special.entr(scores).sum()
        router.sums.add_(torch.stack([entropy, auxiliary.sum(), z.square().sum()]))
        change = None
        if rule.balance == "aux" and rule.balance_weight:
            change = rule.balance_weight * scores * (costs - auxiliary)
            change = change if is_softmax else change * (1 - each)
        if rule.z_weight:
            of_z = 2 * rule.z_weight * z * logits.softmax(-1)
            change = of_z if change is None else change + of_z
        return gradient, None if change is None else factor * change, None, None, None, None, None


@contextlib.contextmanager
def loss_factor(model: nn.Module, factor: float | Tensor) -> Iterator[None]:
    """Says by what a summed loss is multiplied before backward, for forward passes inside and for their backward.

    Without it, it is one over the tokens of each forward pass, which is right for ``cross_entropy(...).backward()``.
    """
    routers = [each for each in model.modules() if isinstance(each, Balanced)]
    before = [each.factor for each in routers]
    for each in routers:
        device = each.load.device
        if isinstance(factor, Tensor) and factor.device == device:
            each.factor = factor.detach()
        else:  # filled and not copied, which a step that is recorded as a CUDA graph could not
            each.factor = torch.full((), float(factor), dtype=torch.float64, device=device)
    try:
        yield
    finally:
        for each, known in zip(routers, before, strict=True):
            each.factor = known


def take_loads(model: nn.Module) -> dict[str, Loads]:
    """Returns what the routers of a model counted on this rank, by the name of their layer, and begins to count anew.

    Of passes with a backward alone, each once. Tensors stay on their device.
    """
    found = {}
    for name, router in model.named_modules():
        if isinstance(router, Balanced):
            entropy, auxiliary, z = router.sums.clone().unbind()
            own = {"choices": router.load.clone(), "dropped": router.dropped.clone()}
            found[name.rpartition(".")[0]] = Loads(**own, entropy=entropy, auxiliary=auxiliary, z=z)
            for each in (router.load, router.dropped, router.sums):
                each.zero_()
    return found
