"""A mixture of experts beside a loop over tokens that calls each one's experts by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.config.sections import RouterConfig
from paceline.engines.float8 import choose_float8
from paceline.models import experts
from paceline.models.experts import Mixture
from paceline.models.gpt import GPT, gpt_config

ROUTERS = {
    "softmax": RouterConfig(balance="none"),
    "scores that keep their sum": RouterConfig(balance="none", renormalise=False, scale=1.5),
    "sigmoid in groups": RouterConfig(balance="none", scores="sigmoid", groups=4, active_groups=2),
}


def mixture(router: RouterConfig, **sizes: int) -> tuple[Mixture, GPT]:
    torch.manual_seed(3)
    shape = gpt_config("gpt-nano", vocab_size=65, experts=8, active=2, router=router, **sizes)
    model = GPT(shape).double()
    found = model.layers[-1].mlp
    assert isinstance(found, Mixture)
    with torch.no_grad():
        found.router.weight.mul_(50)  # experts differ in their scores
    return found, model


def by_hand(layer: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Goes through tokens one by one; scores and choices are those of the rule in the field's own words."""
    rule, tokens, rows = layer.router.rule, x.reshape(-1, x.shape[-1]), []
    for token in tokens:
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if rule.scores == "softmax" else logits.sigmoid()
        allowed = range(len(scores))
        if rule.groups > 1:
            groups = scores.detach().view(rule.groups, -1)
            best = groups.sort(1, descending=True).values[:, :2].sum(1).sort(descending=True).indices
            size = groups.shape[1]
            allowed = [g * size + i for g in best[: rule.active_groups].tolist() for i in range(size)]
        chosen = sorted(allowed, key=lambda e: -scores.detach()[e].item())[: layer.active]
        total = sum(scores[e] for e in chosen) if rule.renormalise else 1.0
        made = torch.zeros_like(token)
        for expert in chosen:
            gate, up = (layer.experts.first[expert] @ token).chunk(2)
            made = made + rule.scale * scores[expert] / total * (layer.experts.last[expert] @ (F.silu(gate) * up))
        rows.append(made)
    out = torch.stack(rows).view(x.shape)
    return out if layer.shared is None else out + layer.shared(x)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("name", ROUTERS)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(name: str, shared: int) -> None:
    layer, _ = mixture(ROUTERS[name], shared_experts=shared, expert_width=32)
    x = torch.randn(2, 7, 64, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*layer.named_parameters(), strict=True)
    found, expected = layer(x), by_hand(layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    toward = torch.randn_like(found)
    ours = torch.autograd.grad(found, (x, *weights), toward)
    theirs = torch.autograd.grad(expected, (x, *weights), toward)
    for name, mine, other in zip(("x", *names), ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13, msg=name)


def test_first_layers_may_be_dense() -> None:
    _, model = mixture(RouterConfig(), dense_layers=2)
    assert [isinstance(block.mlp, Mixture) for block in model.layers] == [False, False, True, True]


def test_parameters_are_those_that_the_shape_counts() -> None:
    _, model = mixture(RouterConfig(), dense_layers=1, shared_experts=2, expert_width=48)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    assert model.config.params == matrices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_in_its_dtype_and_the_router_in_float32(dtype: torch.dtype) -> None:
    layer, _ = mixture(RouterConfig(), shared_experts=1)
    layer.float()
    x = torch.randn(3, 9, 64)
    routing = layer.router(x.flatten(0, 1))
    expected = layer(x)
    with torch.autocast("cpu", dtype):
        found = layer(x)
        again = layer.router(x.flatten(0, 1))
    assert found.dtype == dtype
    assert torch.equal(again.experts, routing.experts)
    assert torch.equal(again.weights, routing.weights)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=scale * 8 * torch.finfo(dtype).eps)
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


def test_without_any_rows_there_are_outputs_and_gradients() -> None:
    layer, _ = mixture(RouterConfig())
    layer(torch.randn(0, 5, 64, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def one_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """What the kernel of a GPU computes, without a look at the counts on the host."""
    places = torch.arange(len(rows), device=rows.device)
    chosen = torch.searchsorted(counts.cumsum(0), places, right=True).clamp(max=len(weights) - 1)
    return torch.einsum("ri,roi->ro", rows, weights[chosen])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.exhaustive), "bias and capacity"])
def test_with_a_kernel_for_all_experts_a_block_is_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = RouterConfig(z_weight=0.1)
    if name == "bias and capacity":
        router = RouterConfig(balance="bias", capacity=1.0, scores="sigmoid", groups=2)
    monkeypatch.setattr(experts, "grouped_product", one_product)
    plain, other = (mixture(router, shared_experts=1)[0] for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for rows in (2, 3):
        x = torch.randn(rows, 8, 64, dtype=torch.float64)
        found, expected = compiled(x), plain(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        for out in (found, expected):
            out.square().sum().backward()
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-13)
    assert torch.equal(other.load, plain.load)
    assert torch.equal(other.dropped, plain.dropped)


def test_experts_compute_with_8_bits_and_those_whose_sizes_do_not_fit_are_named() -> None:
    _, model = mixture(RouterConfig(), shared_experts=1)
    assert "layers.3.mlp.experts" in choose_float8(model, model.blocks()).chosen
    _, model = mixture(RouterConfig(), shared_experts=1, expert_width=24)
    found = choose_float8(model, model.blocks())
    assert "layers.0.mlp.shared.up" not in found.chosen
    assert found.left["layers.3.mlp.experts"] == "sizes that are no multiples of 16"
