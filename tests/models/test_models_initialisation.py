"""The convention of the room: every model can be made on the meta device and filled later, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.models.gpt import GPT, gpt_config
from paceline.models.mlp import MLPClassifier
from paceline.models.registry import model_blocks
from paceline.models.resnet import ResNet

MAKERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLPClassifier(input_dim=12, hidden_dim=8, num_classes=3),
    "resnet-18": lambda: ResNet(18, num_classes=3, width=4),
    "resnet-50-group": lambda: ResNet(50, num_classes=3, width=4, norm="group", stem="small"),
    "gpt-rotary-tied": lambda: GPT(gpt_config("gpt-nano", layers=2)),
    "gpt-rotary-untied": lambda: GPT(gpt_config("gpt-nano", layers=2, tied=False, mlp="gelu")),
    "gpt-learned": lambda: GPT(gpt_config("gpt-nano", layers=2, positions="learned", norm="layer")),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return MAKERS[request.param]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name, with the buffers that state_dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def empty_model(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns a model whose memory is allocated and holds rubbish that would be noticed."""
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in tensors(model).values():
            tensor.fill_(77)
    return model


def reset_own(module: nn.Module) -> None:
    own: Any = getattr(module, "reset_parameters", None)
    if own is not None:
        own()


def reset(module: nn.Module) -> None:
    for each in module.modules():
        reset_own(each)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = tensors(model), tensors(expected)
    assert list(found) == list(wanted)
    assert list(model.state_dict()) == list(expected.state_dict())
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_every_owner_of_tensors_can_reset_them(make: Callable[[], nn.Module]) -> None:
    for name, module in make().named_modules():
        owns = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert not owns or callable(getattr(module, "reset_parameters", None)), name


def test_meta_construction_then_reset_gives_the_values_of_direct_construction(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    direct = make()
    model = empty_model(make)
    torch.manual_seed(0)
    reset(model)
    assert_same(model, direct)


def test_meta_construction_draws_no_random_numbers(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    empty_model(make)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_filled_unit_by_unit(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    direct = make()
    with torch.device("meta"):
        model = make()
    blocks = set(model_blocks(model))
    torch.manual_seed(0)
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in blocks:
            module.to_empty(device="cpu")
            reset(module)
            inside.update(module.modules())
        elif module not in inside:
            module.to_empty(device="cpu", recurse=False)
            reset_own(module)
    assert_same(model, direct)


def test_reset_forgets_training(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for tensor in tensors(model).values():
            tensor.add_(1)
    torch.manual_seed(0)
    reset(model)
    torch.manual_seed(0)
    assert_same(model, make())


def test_float64_is_kept_through_meta_construction() -> None:
    with torch.device("meta"):
        model = GPT(gpt_config("gpt-nano")).double()
    model.to_empty(device="cpu")
    reset(model)
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.float64}
    # float64 tables are as exact as float64 allows, not rounded through float32
    attention = model.get_submodule("layers.0.attention.rotary")
    sin = dict(attention.named_buffers())["sin"]
    assert sin[1, 0].item() == torch.tensor(1.0, dtype=torch.float64).sin().item()
