"""Experts with operands of 8 bits: their numbers, where they stay in bf16, and training over ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from engine_cases import token_losses
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.blocks import compile_model
from paceline.engines.float8 import float8_grouped_product, swap_linears
from paceline.models.experts import Experts, grouped_product
from paceline.models.gpt import GPT, gpt_config
from paceline.models.registry import model_blocks


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(
        gpt_config(
            layers=2, heads=2, width=32, context=16, vocab_size=48, tied=False, experts=4, active=2, expert_width=48
        )
    )


def of_experts(counts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of three experts and five of none, the experts' weights, how many rows each has, and gradients of rows."""
    torch.manual_seed(0)
    rows = torch.randn(sum(counts) + 5, 64, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(3, 96, 64, dtype=torch.bfloat16, requires_grad=True)
    return rows, weights, torch.tensor(counts), torch.randn(sum(counts), 96, dtype=torch.bfloat16)


def far_apart(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("counts", [[40, 7, 33], [0, 61, 2]])
def test_products_are_close_and_gradients_of_weights_as_in_bf16(counts: list[int]) -> None:
    rows, weights, held, g = of_experts(counts)
    found, expected = (
        multiply(rows, weights, held)[: len(g)] for multiply in (float8_grouped_product, grouped_product)
    )
    assert 0.01 < far_apart(found, expected) < 0.05
    ours, theirs = (torch.autograd.grad(each, (rows, weights), g) for each in (found, expected))
    assert 0.01 < far_apart(ours[0][: len(g)], theirs[0][: len(g)]) < 0.05
    torch.testing.assert_close(ours[1], theirs[1])


def test_a_row_is_rounded_alike_whatever_lies_beside() -> None:
    rows, weights, held, g = of_experts([40, 7, 33])
    whole = float8_grouped_product(rows, weights, held)
    of_rows, _ = torch.autograd.grad(whole[:80], (rows, weights), g)
    part, few = rows[40:80].detach().requires_grad_(), weights[1:].detach().requires_grad_()
    found = float8_grouped_product(part, few, held[1:])
    assert torch.equal(found, whole[40:80])
    assert torch.equal(torch.autograd.grad(found, part, g[40:])[0], of_rows[40:80])


def test_no_rows_at_all_give_gradients_of_zero() -> None:
    rows, weights, held, _ = of_experts([0, 0, 0])
    y = float8_grouped_product(rows[:0], weights, held)
    assert y.shape == (0, 96)
    assert not any(each.any() for each in torch.autograd.grad(y, (rows, weights), torch.zeros_like(y)))


def test_experts_stay_in_bf16_on_a_gpu_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_gpt()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    found = swap_linears(model, model.blocks(), by_row=False)
    assert found.left["layers.0.mlp.experts"] == "experts, for which torch has a kernel on Hopper alone"
    assert all(each.float8 is None for each in model.modules() if isinstance(each, Experts))


def losses(comm: Communicator, strategy: Any, **options: Any) -> list[float]:
    engine = parallelize(make_gpt(), comm, strategy, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    first = [torch.randint(0, 48, (8, 1), generator=torch.Generator().manual_seed(step)) for step in range(3)]
    tokens = [(each + 5 * torch.arange(17)) % 48 for each in first]
    return token_losses(engine, optimizer, comm, [(each[:, :-1], each[:, 1:]) for each in tokens], max_norm=1.0)


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint_activations": "matmuls"}, pytest.param({"compile": True}, marks=pytest.mark.exhaustive)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
def test_ranks_train_as_one_process(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    (expected,) = run_virtual(lambda comm: losses(comm, "ddp", precision="fp8"), 1)
    (plain,) = run_virtual(lambda comm: losses(comm, "ddp", precision="bf16_master"), 1)
    assert expected != plain
    assert expected == pytest.approx(plain, rel=0.02)
    for strategy, layout in (("zero2", {"expert": 2}), ("fsdp", {})):
        work: Any = lambda comm, s=strategy, more=layout: losses(comm, s, precision="fp8", **more, **options)  # noqa: E731
        for found in run_virtual(work, 2):
            assert found == pytest.approx(expected, rel=5e-3)


def test_experts_of_8_bits_alone_are_compiled_with_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that torch 2.11 writes otherwise has a race: gradients of rows were wrong by a tenth."""
    taken: list[Any] = []
    monkeypatch.setattr("torch.compile", lambda function, options=None: taken.append(options) or function)
    model = make_gpt()
    compile_model(model, whole=True)
    swap_linears(model, model_blocks(model), by_row=True)
    compile_model(model, whole=True)
    assert taken == [None, {"triton.coalesce_tiling_analysis": False}]
    torch._inductor.config.patch(taken[1])  # which knows the name
