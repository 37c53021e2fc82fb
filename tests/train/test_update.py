"""An update is left out where the norm is not finite, and leaves everything as it was, bit by bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.train.step import update_if_finite

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused plain sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]),
]


def values(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = [t for per_parameter in state.values() for t in per_parameter.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in [*model.parameters(), *tensors]]


def set_gradients(model: nn.Module, value: float) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    first = next(model.parameters())
    assert first.grad is not None
    first.grad.view(-1)[0] = value
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_is_left_out_changes_nothing(
    make: Callable[[Any], torch.optim.Optimizer], value: float, device: str
) -> None:
    model = nn.Linear(3, 2).to(device)
    optimizer = make(model.parameters())
    for _ in range(2):
        update_if_finite(optimizer, set_gradients(model, 1.0))
    before = values(optimizer, model)
    update_if_finite(optimizer, set_gradients(model, value))
    after = values(optimizer, model)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not hasattr(optimizer, "found_inf")
    update_if_finite(optimizer, set_gradients(model, 1.0))
    assert not torch.equal(values(optimizer, model)[0], after[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_memory_is_given_back_before_the_first_update_alone(
    make: Callable[[Any], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an optimizer that keeps no state: it would look as if it had made no update yet."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    model = nn.Linear(3, 2).to("cuda")
    optimizer = make(model.parameters())
    for _ in range(3):
        update_if_finite(optimizer, set_gradients(model, 1.0))
    assert len(calls) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_with_a_bad_first_step_goes_on_as_one_without_it(
    make: Callable[[Any], torch.optim.Optimizer], device: str
) -> None:
    """State that an optimizer makes in its first step must not be that of a step that was left out."""
    model = nn.Linear(3, 2).to(device)
    twin = copy.deepcopy(model)
    optimizer, other = make(model.parameters()), make(twin.parameters())
    update_if_finite(optimizer, set_gradients(model, math.inf))
    for _ in range(3):
        update_if_finite(optimizer, set_gradients(model, 1.0))
        set_gradients(twin, 1.0)
        other.step()
    for ours, theirs in zip(values(optimizer, model), values(other, twin), strict=True):
        assert torch.equal(ours, theirs)


def test_an_error_in_the_update_leaves_no_flag_behind() -> None:
    """With parameters on another device than the norm the host decides, and an error passes through."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = set_gradients(model, 1.0)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError, match="no room"):
        update_if_finite(optimizer, norm)
    assert not hasattr(optimizer, "found_inf")


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_clipping_in_the_update_is_clipping_before_it(
    make: Callable[[Any], torch.optim.Optimizer], max_norm: float, dtype: torch.dtype, device: str
) -> None:
    model = nn.Linear(3, 2).to(device, dtype)
    twin = copy.deepcopy(model)
    optimizer, other = make(model.parameters()), make(twin.parameters())
    for value in (1.0, 2.0, -3.0):
        norm = set_gradients(model, value)
        update_if_finite(optimizer, norm, max_norm)
        set_gradients(twin, value)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        torch.testing.assert_close(norm, expected)
        other.step()
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    for ours, theirs in zip(values(optimizer, model), values(other, twin), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1.0 + 1e-7, 2.0])
def test_gradients_are_as_torch_would_clip_them_bit_by_bit(max_norm: float) -> None:
    model = nn.Linear(3, 2)
    set_gradients(model, 1.0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a norm of about 1, from here on
    twin = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone()
    norm = nn.utils.get_total_norm(gradients_of(model))
    update_if_finite(torch.optim.SGD(model.parameters(), lr=0.1), norm, max_norm)
    nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    for ours, theirs in zip(gradients_of(model), gradients_of(twin), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_is_left_out_leaves_its_gradients_alone() -> None:
    model = nn.Linear(3, 2)
    norm = set_gradients(model, math.inf)
    before = gradients_of(model)
    assert update_if_finite(torch.optim.SGD(model.parameters(), lr=0.1), norm, 1.0) is False
    for was, now in zip(before, gradients_of(model), strict=True):
        assert torch.equal(was, now)
