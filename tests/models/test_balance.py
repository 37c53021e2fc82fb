"""What a router counts, the penalties that its gradient contains, the bias of its choice, and experts with a capacity.

The oracle of penalties is the whole objective, written down as it stands in the docs, and differentiated by autograd.
"""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.config.sections import GPTModelConfig, RouterConfig, gpt_shape
from paceline.models import balance, expert_rows
from paceline.models.balance import loss_factor, take_loads
from paceline.models.experts import Mixture, Router
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.model_shape import RouterRule

EXPERTS, ACTIVE = 8, 2


def small_gpt(router: RouterConfig | None = None, **sizes: Any) -> GPT:
    torch.manual_seed(5)
    router = router or RouterConfig()
    shape = gpt_config("gpt-nano", vocab_size=65, layers=2, experts=EXPERTS, active=ACTIVE, router=router, **sizes)
    model = GPT(shape).double()
    with torch.no_grad():
        for each in mixtures(model):
            each.router.weight.mul_(30)  # experts differ in their scores
    return model


def mixtures(model: nn.Module) -> list[Mixture]:
    return [each for each in model.modules() if isinstance(each, Mixture)]


def samples(rows: int = 3, length: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(65, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def objective(model: GPT, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed cross entropy and the summed penalties, in the terms of the docs and by autograd alone."""
    seen: list[tuple[Mixture, Tensor]] = []
    hooks = [each.register_forward_pre_hook(lambda m, args: seen.append((m, args[0]))) for each in mixtures(model)]
    model.eval()  # where a layer has no penalties of its own
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    penalties = torch.zeros((), dtype=torch.float64)
    for layer, x in seen:
        rule = layer.router.rule
        for row in x:
            logits = row @ layer.router.weight.T
            each = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
            scores = each / each.sum(-1, keepdim=True)
            chosen = layer.router(row).experts.flatten()
            f = torch.bincount(chosen, minlength=EXPERTS).double() / len(chosen)
            if rule.balance == "aux":
                penalties = penalties + rule.balance_weight * len(row) * EXPERTS * (f * scores.mean(0)).sum()
            penalties = penalties + rule.z_weight * logits.logsumexp(-1).square().sum()
    for hook in hooks:
        hook.remove()
    return loss, penalties


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def expected_gradients(model: GPT, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss, penalties = objective(plain, inputs, targets)
    ((loss + penalties) / targets.numel()).backward()
    return gradients(plain)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13, msg=name)


def counted_by_hand(model: GPT, inputs: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    hooks = [
        each.router.register_forward_hook(lambda _m, _a, routing: seen.append(routing.experts))
        for each in mixtures(model)
    ]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return [torch.bincount(each.flatten(), minlength=EXPERTS) for each in seen]


PENALISED = {
    "softmax": RouterConfig(balance_weight=0.3, z_weight=0.05),
    "sigmoid in groups": RouterConfig(
        scores="sigmoid", groups=4, active_groups=2, balance_weight=0.3, z_weight=0.05, scale=2.5
    ),
    "z alone": RouterConfig(balance="none", z_weight=0.1),
}


@pytest.mark.parametrize("name", PENALISED)
def test_gradients_are_those_of_the_objective_that_autograd_differentiates(name: str) -> None:
    model, (inputs, targets) = small_gpt(PENALISED[name], shared_experts=1), samples()
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    expected = expected_gradients(model, inputs, targets)
    assert_close(gradients(model), expected)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    objective(plain, inputs, targets)[0].div(targets.numel()).backward()
    router = "layers.0.mlp.router.weight"
    assert not torch.allclose(gradients(plain)[router], expected[router], rtol=1e-3), "the penalties weigh nothing"


def test_pieces_of_a_batch_make_its_gradient_with_the_factor_of_the_loss() -> None:
    model, (inputs, targets) = small_gpt(PENALISED["softmax"]), samples(rows=5)
    factor = 1 / targets.numel()
    with loss_factor(model, factor):
        for rows in (slice(0, 1), slice(1, 3), slice(3, 5)):
            logits = model(inputs[rows]).flatten(0, 1)
            (F.cross_entropy(logits, targets[rows].flatten(), reduction="sum") * factor).backward()
    assert_close(gradients(model), expected_gradients(model, inputs, targets))


RUNS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda forward: forward,
    "checkpointed": lambda forward: lambda x: checkpoint(forward, x, use_reentrant=False),
    "checkpointed, reentrant": lambda forward: lambda x: checkpoint(forward, x, use_reentrant=True),
    "compiled": lambda forward: torch.compile(forward, backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@pytest.mark.parametrize(
    "how", [pytest.param(name, marks=pytest.mark.exhaustive) if name == "compiled" else name for name in RUNS]
)
def test_each_choice_is_counted_once(how: str) -> None:
    model, (inputs, targets) = small_gpt(PENALISED["softmax"]), samples()
    expected, wanted = counted_by_hand(model, inputs), expected_gradients(model, inputs, targets)
    for block in model.layers:
        block.forward = RUNS[how](block.forward)
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    assert_close(gradients(model), wanted)
    loads = take_loads(model)
    assert list(loads) == ["layers.0.mlp", "layers.1.mlp"]
    for found, counts in zip(loads.values(), expected, strict=True):
        assert found.choices.tolist() == counts.tolist()
        assert counts.sum() == inputs.numel() * ACTIVE
        assert not found.dropped.any()
    assert not any(each.choices.any() or each.entropy for each in take_loads(model).values()), "they count anew"


def test_sums_are_those_of_the_scores() -> None:
    model = small_gpt(RouterConfig(balance="none"), dense_layers=1)
    (layer,) = mixtures(model)
    x = torch.randn(3, 12, 64, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    (found,) = take_loads(layer).values()
    logits = x.detach() @ layer.router.weight.detach().T
    scores = logits.softmax(-1)
    of_rows = logits.topk(ACTIVE, -1).indices
    f = torch.stack([torch.bincount(row.flatten(), minlength=EXPERTS) for row in of_rows])
    auxiliary = EXPERTS * (f[:, None] / (12 * ACTIVE) * scores).sum()
    torch.testing.assert_close(found.entropy, -(scores * scores.log()).sum())
    torch.testing.assert_close(found.auxiliary, auxiliary)
    torch.testing.assert_close(found.z, logits.logsumexp(-1).square().sum())


def test_what_trains_nothing_is_not_counted() -> None:
    model, (inputs, _) = small_gpt(), samples()
    with torch.no_grad():
        model(inputs)
    model.eval()
    model(inputs).sum().backward()
    assert not any(each.choices.any() for each in take_loads(model).values())


def test_frozen_routers_are_counted() -> None:
    model, (inputs, _) = small_gpt(), samples()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)
    model(inputs).sum().backward()
    assert all(each.choices.sum() == inputs.numel() * ACTIVE for each in take_loads(model).values())


def mixed_by_hand(layer: Mixture, x: Tensor, most: int) -> tuple[Tensor, list[int]]:
    """Goes through the tokens of each row in order: an expert that is full takes no more of the row."""
    dropped, rows = [0] * EXPERTS, []
    for row in x:
        places, made = [0] * EXPERTS, []
        routing = layer.router(row)
        for token, experts, weights in zip(row, routing.experts, routing.weights, strict=True):
            out = torch.zeros_like(token)
            for expert, weight in zip(experts.tolist(), weights, strict=True):
                places[expert] += 1
                if places[expert] > most:
                    dropped[expert] += 1
                    continue
                gate, up = (layer.experts.first[expert] @ token).chunk(2)
                out = out + weight * (layer.experts.last[expert] @ (F.silu(gate) * up))
            made.append(out)
        rows.append(torch.stack(made))
    return torch.stack(rows), dropped


@pytest.mark.parametrize("shared", [False, True])
def test_an_expert_with_a_capacity_takes_the_first_tokens_of_each_row(shared: bool) -> None:
    rule = RouterConfig(balance="none", capacity=1.25)
    layer = mixtures(small_gpt(rule, shared_experts=int(shared)))[0]
    x = torch.randn(4, 12, 64, dtype=torch.float64, requires_grad=True)
    expected, dropped = mixed_by_hand(layer, x, most=4)  # 1.25 x 12 x 2 / 8 = 3.75
    assert sum(dropped) > 5
    if layer.shared is not None:
        expected = expected + layer.shared(x)
    toward, weights = torch.randn_like(expected), (x, *layer.parameters())
    theirs = torch.autograd.grad(expected, weights, toward)
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    for mine, other in zip(torch.autograd.grad(found, weights, toward), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)
    assert layer.dropped.tolist() == dropped
    assert layer.load.sum() == 4 * 12 * ACTIVE, "what is dropped was chosen"
    whole = layer(x)
    apart = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(apart, whole, rtol=1e-12, atol=1e-14)  # no row takes the place of another


def test_in_evaluation_experts_take_all_tokens() -> None:
    layer, free = (mixtures(small_gpt(RouterConfig()))[0] for _ in range(2))
    layer.router.rule = replace(layer.router.rule, capacity=0.25)
    x = torch.randn(2, 12, 64, dtype=torch.float64)
    assert not torch.allclose(layer(x), free(x))
    torch.testing.assert_close(layer.eval()(x), free.eval()(x))


def test_what_no_expert_takes_may_be_anything() -> None:
    """A kernel leaves the rows behind those of the last expert as they lie in memory, outputs and gradients."""
    layer = mixtures(small_gpt(RouterConfig(balance="none", capacity=1.0)))[0]
    x = torch.randn(2, 12, 64, dtype=torch.float64, requires_grad=True)
    toward = torch.randn_like(x)
    expected = torch.autograd.grad(layer(x), (x, *layer.parameters()), toward)
    compute = type(layer.experts).forward

    def spoiled(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
        kept = int(counts.sum())
        assert kept < len(rows)
        return SpoilBehind.apply(compute(self, SpoilBehind.apply(rows, kept), counts), kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer.experts), "forward", spoiled)
        found = layer(x)
    assert found.isfinite().all()
    for mine, other in zip(torch.autograd.grad(found, (x, *layer.parameters()), toward), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)


class SpoilBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: int) -> Tensor:
        ctx.kept = kept
        return torch.cat([x[:kept], torch.full_like(x[kept:], 1e9)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.cat([gradient[: ctx.kept], torch.full_like(gradient[ctx.kept :], torch.nan)]), None


def test_a_bias_chooses_and_weighs_nothing() -> None:
    layer = mixtures(small_gpt(RouterConfig(balance="bias")))[0]
    tokens = torch.randn(20, 64, dtype=torch.float64)
    before = layer.router(tokens)
    assert layer.router.bias is not None
    layer.router.bias[3] = 10.0
    after = layer.router(tokens)
    assert (after.experts == 3).any(-1).all(), "every token chooses it now"
    torch.testing.assert_close(after.scores, before.scores, rtol=0, atol=0)
    expected = after.scores.gather(-1, after.experts)
    torch.testing.assert_close(after.weights, expected / expected.sum(-1, keepdim=True))
    assert "layers.0.mlp.router.bias" in small_gpt(RouterConfig(balance="bias")).state_dict()


def test_a_bias_evens_out_what_fell_on_one_expert() -> None:
    rule = RouterConfig(balance="bias", balance_weight=0.02, scores="sigmoid")
    layer = mixtures(small_gpt(rule))[0]
    x = torch.randn(8, 32, 64, dtype=torch.float64) + torch.randn(64, dtype=torch.float64)
    shares = []
    for _ in range(60):
        layer(x).sum().backward()
        shares.append(layer.load.max().item() / layer.load.double().mean().item())
        layer.router.move_bias(layer.router.arrived)
        take_loads(layer)
    assert shares[0] > 2
    assert max(shares[-5:]) < 1.6


def test_biases_and_sums_stay_in_float32() -> None:
    model = small_gpt(RouterConfig(balance="bias")).float().bfloat16()
    router = mixtures(model)[0].router
    assert router.bias is not None
    assert (router.weight.dtype, router.bias.dtype, router.sums.dtype) == (torch.bfloat16, torch.float32, torch.float32)


# Bugs in the lines of the real code: a function, what stands there, what stands there instead, and who must notice.
Bug = tuple[Any, str, str, Callable[[], None]]
PLANTED: dict[str, Bug] = {
    "penalties that do not reach the router": (
        balance._Watched.backward,
        "None if change is None else factor * change",
        "None",
        lambda: test_gradients_are_those_of_the_objective_that_autograd_differentiates("softmax"),
    ),
    "penalties that are not divided under accumulation": (
        balance.Balanced.watch,
        "if self.factor is None",
        "if True",
        lambda: test_pieces_of_a_batch_make_its_gradient_with_the_factor_of_the_loss(),
    ),
    "shares that are not divided by the active experts": (
        balance.look_at,
        "whole.shape[1:].numel()",
        "whole.shape[1]",
        lambda: test_gradients_are_those_of_the_objective_that_autograd_differentiates("softmax"),
    ),
    "a bias in the weights": (
        Router.forward,
        "weights = scores.gather(-1, experts)",
        "weights = choice.gather(-1, experts)",
        lambda: test_a_bias_chooses_and_weighs_nothing(),
    ),
    "choices that forward passes count": (
        balance.Balanced.watch,
        "    watched: Tensor",
        "    self.load.add_(choice.counts)\n    watched: Tensor",
        lambda: test_each_choice_is_counted_once("checkpointed"),
    ),
    "a capacity of the whole batch": (
        balance.look_at,
        "within_capacity(whole, of_rows, capacity)",
        "within_capacity(whole.flatten(0, 1)[None], of_rows.sum(0)[None], capacity).view_as(whole)",
        lambda: test_an_expert_with_a_capacity_takes_the_first_tokens_of_each_row(shared=False),
    ),
    "rows of no expert that reach the tokens": (
        expert_rows._masked,
        "rows if kept is None else",
        "rows if True else",
        lambda: test_what_no_expert_takes_may_be_anything(),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, right, wrong, notice = PLANTED[name]
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@staticmethod\n")
    assert source.count(right) == 1, "the line is another one by now"
    found: dict[str, Any] = {}
    exec(compile(source.replace(right, wrong), "planted", "exec", dont_inherit=True), {**function.__globals__}, found)
    monkeypatch.setattr(function, "__code__", found[function.__name__].__code__)
    with pytest.raises(AssertionError):
        notice()


@pytest.mark.parametrize(
    ("balance", "given", "expected"),
    [("aux", None, 0.01), ("bias", None, 0.001), ("none", None, 0.01), ("bias", 0.01, 0.01), ("aux", 0.0, 0.0)],
)
def test_the_weight_of_balance_follows_its_kind_unless_given(
    balance: Any, given: float | None, expected: float
) -> None:
    router = RouterConfig(balance=balance, balance_weight=given)
    shape = gpt_shape(GPTModelConfig(kind="gpt", size="gpt-nano", experts=4, router=router))
    assert shape is not None
    assert shape.router.balance_weight == expected
    assert shape.router == RouterRule(balance=balance, balance_weight=expected)
    if given is None:
        assert shape.router == RouterRule(balance=balance)
