"""Attention of some queries on some keys, with the log-sum-exp of its scores, by which partial results are merged.

    results A and B      lse = log(exp lseA + exp lseB),  out = outA exp(lseA - lse) + outB exp(lseB - lse)
    gradients on A       the kernel's own backward, given the merged out and lse in the place of those of A

[Note: efficient] In 16 bits torch's efficient kernel gave wrong gradients of causal blocks (torch 2.11 on an H200), and
right ones in float32, in which it runs here. GPUs older than Ampere take it.

Torch has several kernels, and knows which of them fits. Where none does (float64 on a GPU, values wider than keys), the
scores are computed whole, in float32 at least: queries x keys of memory for each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.document_attention import repeat_heads

_aten: Any = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_CPU, _FLASH, _EFFICIENT, _CUDNN = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
_CHOICES = {1: _FLASH, 2: _EFFICIENT, 3: _CUDNN}  # as torch numbers them; 0 is none
_ALIGNED = 32  # the efficient kernel's backward reads its log-sum-exp in pieces of so many
Tokens: TypeAlias = slice | Tensor


class Segments(NamedTuple):
    """Documents behind one another, for a kernel that takes all: where they begin and end, and the longest."""

    query_bounds: Tensor
    key_bounds: Tensor
    most_queries: int
    most_keys: int


class Block(NamedTuple):
    """Which of a rank's queries meet which keys of another one, by their place among the tokens of each.

    On the diagonal a query meets the keys up to its own place, counted from the first of both, or of its segment.
    """

    queries: Tokens
    keys: Tokens
    is_diagonal: bool
    segments: Segments | None = None


def join_blocks(blocks: Sequence[Block], device: torch.device) -> list[Block]:
    """Returns blocks as one, for a kernel that takes all of them; they are alike on the diagonal or off it."""
    if len(blocks) < 2:
        return list(blocks)
    queries, keys = [block.queries for block in blocks], [block.keys for block in blocks]
    most_queries, most_keys = max(_sizes(queries)), max(_sizes(keys))
    segments = Segments(_bounds(queries, device), _bounds(keys, device), most_queries, most_keys)
    return [Block(places_of(queries, device), places_of(keys, device), blocks[0].is_diagonal, segments)]


def _sizes(pieces: Sequence[Any]) -> list[int]:
    return [each.stop - each.start for each in pieces]


def _bounds(pieces: Sequence[Any], device: torch.device) -> Tensor:
    """Returns where each piece begins and ends among the tokens of all."""
    return torch.tensor([0, *accumulate(_sizes(pieces))], dtype=torch.int32, device=device)


def places_of(pieces: Sequence[Any], device: torch.device) -> Tokens:
    """Returns the tokens of all pieces."""
    if all(before.stop == after.start for before, after in pairwise(pieces)):
        return slice(pieces[0].start, pieces[-1].stop) if pieces else slice(0, 0)
    return numbers_of(pieces, device)


def numbers_of(pieces: Sequence[Any], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(each.start, each.stop) for each in pieces]).to(device)


def takes_segments(query: Tensor) -> bool:
    """Says whether one kernel takes all documents of a block."""
    return query.device.type == "cuda" and query.dtype in _HALF and query.shape[3] % 8 == 0


def attend_block(block: Block, scale: float, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output (batch, heads, queries, width), and its log-sum-exp (batch, heads, queries)."""
    if block.segments is not None:
        given = *map(_packed, (query, key, value)), *block.segments, 0.0, block.is_diagonal, False
        out, lse, *_ = _aten._flash_attention_forward(*given, scale=scale)
        return out.transpose(0, 1)[None], lse[None]
    name, key, value = _choose(block, query, key, value)
    if name == _EFFICIENT and query.dtype in _HALF:  # [Note: efficient]
        out, lse = attend_block(block, scale, query.float(), key.float(), value.float())
        return out.to(query.dtype), lse
    if name is None:
        scores = _scores(block, scale, query, key)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ value.to(lse.dtype)).to(query.dtype), lse
    options = () if name in (_CPU, _FLASH) else (None, True)  # no bias; with a log-sum-exp
    run = getattr(_aten, f"_scaled_dot_product_{name}")
    out, lse, *_ = run(query, key, value, *options, 0.0, block.is_diagonal, scale=scale)
    return out, lse.reshape(*lse.shape[:2], -1)[:, :, : query.shape[2]]


def block_gradients(
    block: Block, scale: float, query: Tensor, key: Tensor, value: Tensor, others: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value; the others are output and log-sum-exp of all keys, and gradient.

    Keys and values may have fewer heads than queries; so have their gradients.
    """
    (out, lse, grad), ends, heads = others, (0.0, block.is_diagonal), key.shape[1]
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of random numbers, which nobody draws
    if block.segments is not None:
        given = *map(_packed, (grad, query, key, value, out)), lse[0].contiguous(), *block.segments, *ends
        found = _aten._flash_attention_backward(*given, state, state[:0], scale=scale)
        of_query, of_key, of_value = (each.transpose(0, 1)[None] for each in found)
        return of_query, of_key, of_value
    name, key, value = _choose(block, query, key, value)
    if name == _EFFICIENT and query.dtype in _HALF:
        wide = (out.float(), lse, grad.float())
        return block_gradients(block, scale, query.float(), key.float(), value.float(), wide)
    lse, sizes, signed = lse.contiguous(), (query.shape[2], key.shape[2]), state.view(torch.int64)
    if name is None:
        weights = (_scores(block, scale, query, key) - lse[..., None]).exp()
        query, key, value, out, grad = (each.to(weights.dtype) for each in (query, key, value, out, grad))
        of_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
        of_query, of_key, of_value = of_scores @ key, of_scores.mT @ query, weights.mT @ grad
    else:
        rest: dict[str, tuple[Any, ...]] = {
            _CPU: (out, lse, *ends),
            _FLASH: (out, lse, None, None, *sizes, *ends, state, state),
            _CUDNN: (out, lse[..., None], signed, signed, None, None, None, *sizes, *ends),
        }
        aligned = F.pad(lse, (0, -lse.shape[2] % _ALIGNED), value=torch.inf)
        rest[_EFFICIENT] = None, out, aligned, signed, signed, 0.0, [True, True, True, False], block.is_diagonal
        run = getattr(_aten, f"_scaled_dot_product_{name}_backward")
        of_query, of_key, of_value, *_ = run(grad, query, key, value, *rest[name], scale=scale)
    if of_key.shape[1] > heads:  # of heads that were repeated
        of_key, of_value = (each.unflatten(1, (heads, -1)).sum(2) for each in (of_key, of_value))
    return of_query, of_key, of_value


def _choose(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[str | None, Tensor, Tensor]:
    """Returns which kernel computes, if one can, and keys and values with as many heads as it takes."""
    device, name = query.device.type, None
    shares = query.dtype in _HALF and device in ("cuda", "meta")
    wide = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    key, value = (key, value) if shares else wide
    if device == "meta":  # a dry run: in narrow dtypes it stands for a GPU
        name = _FLASH if shares else _CPU
    elif value.shape[3] == query.shape[3] and (device == "cpu" or query.shape[3] % 8 == 0):
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, block.is_diagonal, enable_gqa=shares)
        name = _CPU if choice and device == "cpu" else _CHOICES.get(choice)
    return (name, key, value) if name else (None, *wide)


def _scores(block: Block, scale: float, query: Tensor, key: Tensor) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    if not block.is_diagonal:
        return scores
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)


def _packed(tensor: Tensor) -> Tensor:
    """Returns (1, heads, tokens, width) as (tokens, heads, width)."""
    return tensor[0].transpose(0, 1)


def attend_dropped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float, numbers: Tensor
) -> Tensor:
    """Returns attention on all keys of a row, some weights of which are dropped; ``numbers`` are those of queries.

    Which ones is a function of a number that is drawn on the CPU, of the head, and of the numbers of query and key.
    """
    heads, keys = (torch.arange(size, device=query.device) for size in (query.shape[1], key.shape[2]))
    drawn = _mixed(_mixed(heads[:, None] + int(torch.randint(2**31, ()))) + numbers[:, None])
    is_kept = _mixed(drawn[..., None] + keys) >= int(dropout * 2**32)
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (repeat_heads(each, query.shape[1]).to(dtype) for each in (key, value))
    scores = query.to(dtype) @ key.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) * is_kept / (1 - dropout) @ value).to(query.dtype)


def _mixed(number: Tensor) -> Tensor:
    """Returns 32 bits, each of which depends on all bits of a number (lowbias32 of Wellons)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        number = number & 0xFFFFFFFF
        number = (number ^ (number >> shift)) * factor
    return number & 0xFFFFFFFF
