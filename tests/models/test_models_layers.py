"""Models as rows of layers: which run as forward does, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.layers import PipelineLayer, model_layers


def run(model: nn.Module, *args: Any) -> Any:
    first, *others = model_layers(model)
    x = first.run(*args)
    for layer in others:
        x = layer.run(x)
    return x


def test_children_without_parameters_join_the_layer_before() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.ReLU()
    )
    layers = model_layers(model)
    assert [layer.name for layer in layers] == ["0", "3.0"]
    assert [len(layer.modules) for layer in layers] == [3, 3]
    x = torch.randn(2, 4)
    assert torch.equal(run(model, x), model(x))


def test_a_sequential_of_no_parameters_is_one_layer() -> None:
    assert [layer.name for layer in model_layers(nn.Sequential(nn.ReLU(), nn.Tanh()))] == ["0"]


def test_a_module_that_is_called_twice_is_two_layers() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert [layer.name for layer in model_layers(model)] == ["0", "2"]
    x = torch.randn(2, 3)
    assert torch.equal(run(model, x), model(x))


def test_a_sequential_with_a_forward_of_its_own_is_not_opened() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    model = nn.Sequential(Twice(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
    assert [layer.name for layer in model_layers(model)] == ["0", "1"]
    with pytest.raises(UsageError, match="Twice cannot be cut into stages"):
        model_layers(Twice(nn.Linear(3, 3)))


def test_a_model_that_says_nothing_is_told_how() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    with pytest.raises(UsageError) as caught:
        model_layers(Tower())
    text = str(caught.value)
    assert "it has no method pipeline_layers(), and is not a plain nn.Sequential" in text
    assert 'PipelineLayer(name=f"encoder.{i}", run=layer, modules=(layer,))' in text


class Wrong(nn.Module):
    def __init__(self, say: Callable[[Wrong], list[Any]]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self._say = say

    def pipeline_layers(self) -> list[Any]:
        return self._say(self)


def layer(name: str, *modules: nn.Module) -> PipelineLayer:
    return PipelineLayer(name=name, run=modules[0], modules=modules)


@pytest.mark.parametrize(
    ("say", "text"),
    [
        (lambda _: [], "Wrong has no pipeline layers"),
        (lambda m: [m.a, m.b], "Wrong has Linear among its pipeline layers"),
        (lambda m: [layer("a", m.a), layer("a", m.b)], "are called 'a'"),
        (lambda m: [layer("a", m.a), layer("b", nn.Linear(2, 2))], "a Linear that is not in the model"),
        (lambda m: [layer("a", m)], "uses the model itself"),
        (lambda m: [layer("a", m.a)], "scale and 2 more of Wrong belong to no pipeline layer"),
        (lambda m: [layer("a", m.a), layer("b", m.b)], "scale of Wrong belongs to no pipeline layer"),
    ],
)
def test_layers_that_do_not_make_up_the_model_are_named(say: Callable[[Wrong], list[Any]], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        model_layers(Wrong(say))
    assert text in str(caught.value)
