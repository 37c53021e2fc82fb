"""The optimizer of a config: which class, which groups, which rates."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import OptimConfig
from paceline.errors import UsageError
from paceline.train.optim import build_optimizer, set_learning_rate


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2, 2), requires_grad=False))
    return model


def build(model: nn.Module, **values: Any) -> torch.optim.Optimizer:
    return build_optimizer(OptimConfig(**values), model.named_parameters())


def names_by_decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[float, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "torch.optim:Adam"])
def test_weight_decay_is_for_matrices_and_frozen_parameters_stay_out(kind: str) -> None:
    model = make_model()
    groups = names_by_decay(model, build(model, kind=kind, weight_decay=0.3))
    assert groups == {0.3: {"0.weight", "2.weight"}, 0.0: {"0.bias", "1.weight", "1.bias"}}


def test_adamw_takes_its_settings() -> None:
    optimizer = build(make_model(), kind="adamw", lr=0.02, betas=(0.8, 0.95), eps=1e-6)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.02, (0.8, 0.95), 1e-6)


def test_sgd_takes_its_settings() -> None:
    optimizer = build(make_model(), kind="sgd", lr=0.02, momentum=0.7, nesterov=True)
    assert isinstance(optimizer, torch.optim.SGD)
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.02, 0.7, True)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_fused_update_is_the_plain_one(kind: str) -> None:
    """Fused kernels are for speed alone."""
    results = []
    for fused in (True, False):
        model = make_model().double()
        optimizer = build(model, kind=kind, lr=0.05, weight_decay=0.1)
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = fused, False
        for step in range(3):
            x = torch.full((5, 3), 0.1 * (step + 1), dtype=torch.float64) * torch.arange(1.0, 4.0)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        results.append(model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=0, atol=1e-12)


def test_an_optimizer_by_its_path_gets_rate_and_args() -> None:
    optimizer = build(make_model(), kind="torch.optim:Adagrad", lr=0.4, args={"lr_decay": 0.25})
    assert isinstance(optimizer, torch.optim.Adagrad)
    assert {group["lr_decay"] for group in optimizer.param_groups} == {0.25}
    assert {group["lr"] for group in optimizer.param_groups} == {0.4}


def test_a_model_of_matrices_alone_has_one_group() -> None:
    model = nn.Linear(2, 2, bias=False)
    assert len(build(model).param_groups) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "torch.optim:Adma"}, "did you mean Adam"),
        ({"kind": "no_such_module:Thing"}, "no module 'no_such_module'"),
        ({"kind": "torch.optim:Adam", "args": {"momentun": 0.9}}, "momentun"),
        ({"kind": "builtins:dict", "args": {"a": 1}}, "optim.kind = builtins:dict"),
    ],
)
def test_what_cannot_be_an_optimizer_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"optim\.kind") as refusal:
        build(make_model(), **values)
    assert message in str(refusal.value)


def test_what_is_made_must_be_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        import_module("paceline.train.optim"), "import_from_path", lambda *_: lambda groups, **_kwargs: groups
    )
    with pytest.raises(UsageError, match="made a list, not a torch optimizer"):
        build(make_model(), kind="somewhere:thing")


def test_the_learning_rate_is_a_share_of_the_first_one_and_does_not_compound() -> None:
    model = make_model()
    optimizer = build(model, lr=0.5)
    assert [set_learning_rate(optimizer, factor) for factor in (0.5, 0.5, 1.0, 0.1)] == [0.25, 0.25, 0.5, 0.05]
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}


def test_groups_keep_rates_of_their_own() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.1}])
    assert set_learning_rate(optimizer, 0.5) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


def test_the_peak_rate_survives_a_state_dict() -> None:
    """A resumed run must not take a decayed rate for its peak."""
    optimizer = build(make_model(), lr=0.5)
    set_learning_rate(optimizer, 0.1)
    resumed = build(make_model(), lr=0.5)
    resumed.load_state_dict(optimizer.state_dict())
    assert set_learning_rate(resumed, 1.0) == 0.5
