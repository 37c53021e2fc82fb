"""Attention over a million tokens: more elements in a tensor than 32 bits can count, and still the right numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.models.attention import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS, HEADS, WIDTH, LAST = 2**20, 16, 128, 64
TOLERANCE = 2e-2


def test_the_last_tokens_of_a_million_are_right() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = [
        torch.randn(
            (1, TOKENS, HEADS * WIDTH), generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for _ in range(3)
    ]
    query, key, value = (each.view(1, TOKENS, HEADS, WIDTH).transpose(1, 2) for each in rows)
    out = attention(query, key, value, is_causal=True)
    slope = torch.zeros_like(out)
    slope[:, :, -LAST:] = torch.randn((1, HEADS, LAST, WIDTH), generator=generator, device="cuda").bfloat16()
    found = [out.detach()[0, :, -LAST:], *torch.autograd.grad(out, rows, slope)]
    for head in (0, HEADS - 1):
        inputs = [each.detach()[0, head].float().requires_grad_() for each in (query[:, :, -LAST:], key, value)]
        expected = last_rows(*inputs)
        wanted = torch.autograd.grad(expected, inputs, slope[0, head, -LAST:].float())
        check(found[0][head], expected.detach())
        for ours, theirs in zip(found[1:], wanted, strict=True):
            check(ours.view(TOKENS, HEADS, WIDTH)[-theirs.shape[0] :, head], theirs)


def last_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns what the last tokens see of all tokens."""
    scores = query @ key.T / WIDTH**0.5
    hidden = torch.ones((LAST, LAST), dtype=torch.bool, device="cuda").triu(1)
    scores[:, -LAST:] = scores[:, -LAST:].masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value


def check(found: Tensor, expected: Tensor) -> None:
    """Checks all rows beside one another: their largest difference by the largest value."""
    assert expected.abs().max() > 0
    assert (found.float() - expected).abs().max() < TOLERANCE * expected.abs().max()
