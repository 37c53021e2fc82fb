"""Rows to experts and back: values and gradients in float64, and the operators as torch wants them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.models.expert_rows import collect, spread

TOKENS, ACTIVE, WIDTH, EXPERTS = 5, 3, 4, 4


def sorted_choices(seed: int = 0) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(EXPERTS, (TOKENS * ACTIVE,), generator=torch.Generator().manual_seed(seed))
    order = chosen.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def draw(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sizes[0])
    return torch.randn(*sizes, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_are_those_of_the_definition(drops: bool) -> None:
    order, place = sorted_choices()
    kept = torch.arange(TOKENS * ACTIVE) % 4 != 1 if drops else None
    tokens, rows, weights = draw(TOKENS, WIDTH), draw(TOKENS * ACTIVE, WIDTH), draw(TOKENS, ACTIVE)
    spread_out = spread(tokens, order, place, ACTIVE, kept)
    for row, choice in enumerate(order.tolist()):
        assert torch.equal(spread_out[row], tokens[choice // ACTIVE])
    mixed = collect(rows, order, place, weights, kept)
    for token in range(TOKENS):
        choices = [token * ACTIVE + j for j in range(ACTIVE)]
        takes = [kept is None or bool(kept[choice]) for choice in choices]
        parts = [weights[token, j] * rows[place[choice]] * takes[j] for j, choice in enumerate(choices)]
        torch.testing.assert_close(mixed[token], torch.stack(parts).sum(0), rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x, w: collect(x, order, place, w, kept), (rows, weights))
    if not drops:  # of what is dropped the gradient is none, whatever forward hands out
        assert torch.autograd.gradcheck(lambda x: spread(x, order, place, ACTIVE, None), (tokens,))


def test_what_is_dropped_may_hold_anything() -> None:
    order, place = sorted_choices(1)
    kept = torch.arange(TOKENS * ACTIVE) % 2 == 0
    rows = draw(TOKENS * ACTIVE, WIDTH).detach()
    rows[place[~kept]] = float("nan")
    rows.requires_grad_()
    weights = draw(TOKENS, ACTIVE)
    mixed = collect(rows, order, place, weights, kept)
    of_rows, of_weights = torch.autograd.grad(mixed.sum(), (rows, weights))
    assert mixed.isfinite().all()
    assert of_weights.isfinite().all()
    assert not of_rows[place[~kept]].any()
    toward = torch.full((len(order), WIDTH), float("nan"), dtype=torch.float64)
    toward[place[kept]] = 1.0
    tokens = draw(TOKENS, WIDTH)
    (found,) = torch.autograd.grad(spread(tokens, order, place, ACTIVE, kept), tokens, toward)
    expected = kept.view(TOKENS, ACTIVE).sum(1, keepdim=True).expand(-1, WIDTH)
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=0)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # opcheck, torch 2.15
def test_a_compiler_may_hold_both() -> None:
    order, place = sorted_choices()
    tokens, rows, weights = draw(TOKENS, WIDTH), draw(TOKENS * ACTIVE, WIDTH), draw(TOKENS, ACTIVE)
    spread_of = torch.ops.paceline.spread_rows.default, (tokens, order, place, ACTIVE, None, None, None)
    collect_of = torch.ops.paceline.collect_rows.default, (rows, order, place, ACTIVE, weights, None)
    for operator, arguments in (spread_of, collect_of):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_there_may_be_no_tokens() -> None:
    none = torch.empty(0, dtype=torch.int64)
    tokens, weights = (torch.zeros(0, size, dtype=torch.float64, requires_grad=True) for size in (WIDTH, ACTIVE))
    mixed = collect(spread(tokens, none, none, ACTIVE, None), none, none, weights, None)
    assert mixed.shape == (0, WIDTH)
    mixed.sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.shape == (0, WIDTH)
