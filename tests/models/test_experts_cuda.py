"""Experts on a GPU: one kernel for the products of all of them, forward and backward, beside a product for each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.config.sections import RouterConfig
from paceline.models.balance import take_loads
from paceline.models.expert_rows import collect, gate, spread
from paceline.models.experts import Mixture, grouped_product
from paceline.models.gpt import GPT, gpt_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def one_by_one(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    *parts, rest = torch.split(rows, [*counts.tolist(), len(rows) - int(counts.sum())])
    made = [F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)]
    return torch.cat([*made, rest.new_zeros(len(rest), weights.shape[1])])


@pytest.mark.parametrize("counts", [[16, 16, 16], [1, 0, 30], [0, 0, 5], [7, 13, 0], [0, 0, 0]])
@pytest.mark.parametrize("sizes", [(64, 128), (24, 40), (20, 36)])  # the last ones are no multiples of 16 bytes
def test_products_and_gradients_are_those_of_a_product_for_each_expert(
    counts: list[int], sizes: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    kept = sum(counts)
    rows = torch.randn(kept + 6, sizes[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(3, sizes[1], sizes[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    held = torch.tensor(counts, device="cuda")
    toward = torch.randn(kept, sizes[1], device="cuda", dtype=torch.bfloat16)
    found, expected = grouped_product(rows, weights, held)[:kept], one_by_one(rows, weights, held)[:kept]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-1)
    ours, theirs = (torch.autograd.grad(each, (rows, weights), toward) for each in (found, expected))
    torch.testing.assert_close(ours[0][:kept], theirs[0][:kept], rtol=2e-2, atol=4e-1)
    torch.testing.assert_close(ours[1], theirs[1], rtol=2e-2, atol=4e-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("sizes", [(64, 2, 128), (33, 3, 1030), (7, 1, 5), (300, 8, 2048)])
def test_rows_go_to_experts_and_back_as_in_float64(
    sizes: tuple[int, int, int], drops: bool, dtype: torch.dtype
) -> None:
    tokens, active, width = sizes
    torch.manual_seed(tokens)
    order = torch.randint(8, (tokens * active,), device="cuda").argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cuda"))
    kept = torch.rand(len(order), device="cuda") < 0.7 if drops else None
    x, rows, toward = (torch.randn(n, width, device="cuda").to(dtype) for n in (tokens, len(order), tokens))
    if kept is not None:
        rows[place[~kept]] = float("nan")
    weights = torch.rand(tokens, active, device="cuda")
    found, expected = [], []
    for wide, results in ((torch.float64, expected), (dtype, found)):
        of = [each.to(wide).requires_grad_() for each in (x, rows)] + [
            weights.to(wide if wide == torch.float64 else weights.dtype)
        ]
        of[2].requires_grad_()
        out = spread(of[0], order, place, active, kept)
        mixed = collect(of[1], order, place, of[2], kept)
        made = torch.where(
            torch.ones_like(out, dtype=torch.bool) if kept is None else kept[order].unsqueeze(1), out, 0.0
        )
        results += [made, mixed, *torch.autograd.grad(out, of[0], rows.to(wide))]
        results += torch.autograd.grad(mixed, of[1:], toward.to(wide))
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for ours, right in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        off = float((ours.double() - right).abs().max())
        assert off <= bound * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(5, 3), (64, 128), (9, 1500), (0, 8)])
def test_gates_are_those_in_float64(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(sizes[1])
    rows, toward = torch.randn(sizes[0], 2 * sizes[1], device="cuda"), torch.randn(*sizes, device="cuda")
    found = []
    for wide in (dtype, torch.float64):
        inner = rows.to(dtype).to(wide).requires_grad_()
        out = gate(inner)
        found.append((out.double(), torch.autograd.grad(out, inner, toward.to(dtype).to(wide))[0].double()))
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=bound, atol=bound)


def make_mixture(router: RouterConfig, device: str) -> Mixture:
    torch.manual_seed(3)
    model = GPT(gpt_config("gpt-nano", vocab_size=65, experts=8, active=2, shared_experts=1, router=router))
    layer = model.layers[0].mlp
    assert isinstance(layer, Mixture)
    with torch.no_grad():
        layer.router.weight.mul_(50)
    return layer.to(device)


@pytest.mark.parametrize("router", [RouterConfig(z_weight=0.1), RouterConfig(balance="bias", capacity=1.0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_computes_on_a_gpu_what_it_computes_on_a_cpu(router: RouterConfig, compiled: bool) -> None:
    plain, layer = make_mixture(router, "cpu"), make_mixture(router, "cuda")
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(4, 64, 64)
    expected = plain(x)
    with torch.autocast("cuda", torch.bfloat16):
        found = run(x.cuda())
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=0.05 * scale)
    found.float().square().mean().backward()
    expected.square().mean().backward()
    for (name, mine), theirs in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        bound = 0.05 * float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=0, atol=bound, msg=name)
    ours, reference = (next(iter(take_loads(each).values())) for each in (layer, plain))
    assert ours.choices.tolist() == reference.choices.tolist()
    assert ours.dropped.tolist() == reference.dropped.tolist()


def test_without_a_capacity_the_host_never_waits_for_the_device() -> None:
    layer = make_mixture(RouterConfig(z_weight=0.1), "cuda").bfloat16()
    x = torch.randn(4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).float().sum().backward()
        layer.router.move_bias(layer.router.arrived)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_memory_is_that_of_the_rows_and_not_of_all_experts() -> None:
    """8,192 tokens x 128 experts x 512 features of bf16 are a GiB; the rows of two experts each are 16 MiB."""
    shape = gpt_config("gpt-nano", vocab_size=65, width=512, mlp_width=512, experts=128, active=2)
    layer = GPT(shape).layers[0].mlp.to("cuda", torch.bfloat16)
    x = torch.randn(8, 1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    layer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x).sum().backward()
    weights = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert torch.cuda.max_memory_allocated() - before - 2 * weights < 2**29
