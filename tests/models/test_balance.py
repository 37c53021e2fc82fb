"""What a router counts, the penalties that its gradient contains, the bias of its choice, and experts with a capacity.

The oracle of penalties is the whole objective, written down as it stands in the docs, and differentiated by autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.config.sections import RouterConfig
from paceline.models.balance import loss_factor, take_loads
from paceline.models.experts import Mixture
from paceline.models.gpt import GPT, gpt_config

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
@pytest.mark.parametrize("how", RUNS)
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
