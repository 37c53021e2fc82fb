"""The Triton kernels of ``expert_rows``: what is done to rows beside products, each in one go, with sums in float32.

A program has a row of an expert, or a part of a token. Import this where there is a GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 2


@triton.jit  # type: ignore[untyped-decorator]
def _spread_kernel(  # type: ignore[no-untyped-def]
    tokens,
    order,
    weights,
    made,
    kept,
    rows,
    of_weights,
    width,
    active: tl.constexpr,
    weighs: tl.constexpr,
    drops: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(order + row)
    end = tl.where(tl.load(kept + choice) != 0, width, 0) if drops else width  # of what is read
    tokens += (choice // active) * width
    weight = tl.load(weights + choice).to(tl.float32) if weighs else 1.0
    product = tl.zeros((block,), tl.float32)
    for begin in range(0, width, block):
        place = begin + tl.arange(0, block)
        x = tl.load(tokens + place, mask=place < end, other=0.0).to(tl.float32)
        if weighs:
            product += x * tl.load(made + row * width + place, mask=place < end, other=0.0).to(tl.float32)
            x *= weight
        tl.store(rows + row * width + place, x, mask=place < width)
    if weighs:
        tl.store(of_weights + choice, tl.sum(product))


@triton.jit  # type: ignore[untyped-decorator]
def _collect_kernel(  # type: ignore[no-untyped-def]
    rows,
    place_of,
    weights,
    kept,
    tokens,
    width,
    active: tl.constexpr,
    weighs: tl.constexpr,
    drops: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for number in tl.static_range(active):
        choice = token * active + number
        end = tl.where(tl.load(kept + choice) != 0, width, 0) if drops else width
        row = tl.load(place_of + choice)
        x = tl.load(rows + row * width + place, mask=place < end, other=0.0).to(tl.float32)
        total += x * tl.load(weights + choice).to(tl.float32) if weighs else x
    tl.store(tokens + token * width + place, total, mask=place < width)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    inner, gradient, made, width, is_backward: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    inner += 2 * row * width
    for begin in range(0, width, block):
        place = begin + tl.arange(0, block)
        inside = place < width
        gate = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + width + place, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        if is_backward:
            toward = tl.load(gradient + row * width + place, mask=inside, other=0.0).to(tl.float32)
            slope = share * (1.0 + gate * (1.0 - share))
            tl.store(made + 2 * row * width + place, toward * up * slope, mask=inside)
            tl.store(made + 2 * row * width + width + place, toward * gate * share, mask=inside)
        else:
            tl.store(made + row * width + place, gate * share * up, mask=inside)


def gate_on_gpu(inner: Tensor, gradient: Tensor | None) -> Tensor:
    """Returns silu(a) b of rows that are a, b; with the gradient of that, the gradient of the rows."""
    inner, width = inner.contiguous(), inner.shape[1] // 2
    made = inner.new_empty(len(inner), width) if gradient is None else torch.empty_like(inner)
    if made.numel():
        given = inner if gradient is None else gradient.contiguous()
        with torch.cuda.device(inner.device):
            _gate_kernel[(len(inner),)](
                inner, given, made, width, is_backward=gradient is not None, block=_block(width)
            )
    return made


def spread_on_gpu(
    tokens: Tensor, order: Tensor, active: int, weights: Tensor | None, made: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns each choice's row of its token, times its weight, and the gradients of the weights of ``made``."""
    tokens, width = tokens.contiguous(), tokens.shape[1]
    rows = tokens.new_empty(len(order), width)
    of_weights = tokens.new_empty(0) if weights is None else torch.empty_like(weights)
    if rows.numel():
        given = (each if each is None else each.contiguous() for each in (weights, made, kept))
        tensors = (tokens, order, *(tokens if each is None else each for each in given), rows, of_weights)
        with torch.cuda.device(tokens.device):
            _spread_kernel[(len(order),)](*tensors, width, **_kinds(width, active, weights, kept))
    return rows, of_weights


def collect_on_gpu(rows: Tensor, place: Tensor, active: int, weights: Tensor | None, kept: Tensor | None) -> Tensor:
    """Returns for each token the sum of its choices' rows, each times its weight."""
    rows, width = rows.contiguous(), rows.shape[1]
    tokens = rows.new_empty(len(place) // active, width)
    if tokens.numel():
        kinds = _kinds(width, active, weights, kept)
        given = (rows if each is None else each.contiguous() for each in (weights, kept))
        with torch.cuda.device(rows.device):
            _collect_kernel[(len(tokens), triton.cdiv(width, kinds["block"]))](
                rows, place, *given, tokens, width, **kinds
            )
    return tokens


def _kinds(width: int, active: int, weights: Tensor | None, kept: Tensor | None) -> dict[str, Any]:
    flags = {"weighs": weights is not None, "drops": kept is not None}
    return {"active": active, **flags, "block": _block(width), "num_warps": _WARPS}


def _block(width: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(width)))
