"""Rows between tokens and their experts, each in one operator that a compiled graph can hold.

    spread     rows[i]  = tokens[order[i] // k]                   i counts rows as they are sorted by their experts
    gate       inner[i] = silu(a) b, where row i is a, b
    collect    mixed[t] = sum over j of  w_tj rows[place[t k + j]]     ``place`` is the inverse of ``order``

The first and the last are what the other's backward computes: ``spread`` with weights, beside the gradients of these.
Choices that are not ``kept`` give nothing, whatever their rows hold. On a GPU a kernel does all of it; elsewhere, and
in float64, torch's own functions do, which add in the order of the choices.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None

Pair = tuple[Tensor, Tensor]


def spread(tokens: Tensor, order: Tensor, place: Tensor, active: int, kept: Tensor | None) -> Tensor:
    """Returns a row for each choice (choices, width), in the order of the experts."""
    rows: Tensor = _spread(tokens, order, place, active, None, None, kept)[0]
    return rows


def collect(rows: Tensor, order: Tensor, place: Tensor, weights: Tensor, kept: Tensor | None) -> Tensor:
    """Returns for each token the sum of its experts' rows, each times its weight (tokens, active)."""
    mixed: Tensor = _collect(rows, order, place, weights.shape[1], weights, kept)
    return mixed


def gate(inner: Tensor) -> Tensor:
    """Returns what rows (rows, 2 x features) of a gate and of what it lets through make."""
    if not _has_kernel(inner):
        first, second = inner.chunk(2, dim=-1)
        return F.silu(first) * second
    made: Tensor = _gate(inner, None)
    return made


def _run_gate(inner: Tensor, gradient: Tensor | None) -> Tensor:
    from paceline.models.expert_rows_kernel import gate_on_gpu

    return gate_on_gpu(inner, gradient)


def _empty_gate(inner: Tensor, gradient: Tensor | None) -> Tensor:
    return torch.empty_like(inner) if gradient is not None else inner.new_empty(len(inner), inner.shape[1] // 2)


def _run_spread(
    tokens: Tensor,
    order: Tensor,
    place: Tensor,
    active: int,
    weights: Tensor | None,
    made: Tensor | None,
    kept: Tensor | None,
) -> Pair:
    if _has_kernel(tokens):
        from paceline.models.expert_rows_kernel import spread_on_gpu  # where there is no GPU, there is no triton

        return spread_on_gpu(tokens, order, active, weights, made, kept)
    if weights is None or made is None:
        return tokens.index_select(0, order // active), tokens.new_empty(0)
    each = tokens.unsqueeze(1)
    rows = _masked((each * weights.unsqueeze(-1).to(each.dtype)).flatten(0, 1), kept)
    own = _masked(made.index_select(0, place), kept).view(len(tokens), active, tokens.shape[1])
    return rows.index_select(0, order), (each * own).sum(-1).to(weights.dtype)


def _run_collect(
    rows: Tensor, order: Tensor, place: Tensor, active: int, weights: Tensor | None, kept: Tensor | None
) -> Tensor:
    if _has_kernel(rows):
        from paceline.models.expert_rows_kernel import collect_on_gpu

        return collect_on_gpu(rows, place, active, weights, kept)
    own = _masked(rows.index_select(0, place), kept).view(len(order) // active, active, rows.shape[1])
    return (own if weights is None else own * weights.unsqueeze(-1).to(own.dtype)).sum(1)


def _masked(rows: Tensor, kept: Tensor | None) -> Tensor:
    return rows if kept is None else torch.where(kept.unsqueeze(-1), rows, 0.0)


def _has_kernel(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype != torch.float64 and _HAS_TRITON


def _empty_spread(tokens: Tensor, order: Tensor, place: Tensor, active: int, weights: Any, *_: Any) -> Pair:  # noqa: ARG001
    of_weights = tokens.new_empty(0) if weights is None else torch.empty_like(weights)
    return tokens.new_empty(len(order), tokens.shape[1]), of_weights


def _empty_collect(rows: Tensor, order: Tensor, place: Tensor, active: int, *_: Any) -> Tensor:  # noqa: ARG001
    return rows.new_empty(len(order) // active, rows.shape[1])


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    _, order, place, ctx.active, _, _, kept = inputs
    ctx.save_for_backward(order, place, kept)
    ctx.mark_non_differentiable(output[1])


def _add_up(ctx: Any, gradient: Tensor, _: Any) -> Any:
    order, place, kept = ctx.saved_tensors
    return _collect(gradient, order, place, ctx.active, None, kept), *[None] * 6


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    rows, order, place, ctx.active, weights, kept = inputs
    ctx.save_for_backward(rows, order, place, weights, kept)


def _hand_out(ctx: Any, gradient: Tensor) -> Any:
    rows, order, place, weights, kept = ctx.saved_tensors
    of_rows, of_weights = _spread(gradient, order, place, ctx.active, weights, rows, kept)
    return of_rows, None, None, None, of_weights, None


_spread = torch.library.custom_op(
    "paceline::spread_rows",
    _run_spread,
    mutates_args=(),
    schema="(Tensor tokens, Tensor order, Tensor place, int active, Tensor? weights, Tensor? made, Tensor? kept)"
    " -> (Tensor, Tensor)",
)
_collect = torch.library.custom_op(
    "paceline::collect_rows",
    _run_collect,
    mutates_args=(),
    schema="(Tensor rows, Tensor order, Tensor place, int active, Tensor? weights, Tensor? kept) -> Tensor",
)
_spread.register_fake(_empty_spread)
_spread.register_autograd(_add_up, setup_context=_keep_order)
_collect.register_fake(_empty_collect)
_collect.register_autograd(_hand_out, setup_context=_keep_rows)
_gate = torch.library.custom_op(
    "paceline::gate_rows", _run_gate, mutates_args=(), schema="(Tensor inner, Tensor? gradient) -> Tensor"
)
_gate.register_fake(_empty_gate)
_gate.register_autograd(
    lambda ctx, gradient: (_gate(*ctx.saved_tensors, gradient), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),  # noqa: ARG005
)
