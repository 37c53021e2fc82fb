from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.sections import FactoryModelConfig, GPTModelConfig, MLPModelConfig, ResNetModelConfig
from paceline.data.datasets import DataShape
from paceline.errors import ConfigError, UsageError
from paceline.models.gpt import GPT, SIZES
from paceline.models.mlp import MLPClassifier
from paceline.models.registry import build_model, model_blocks, num_parameters
from paceline.models.resnet import ResNet


def make_shape(kind: Any, **known: int) -> DataShape:
    names = ("features", "channels", "size", "classes", "vocab_size", "context")
    return DataShape(kind=kind, **{name: known.get(name) for name in names})


ROWS = make_shape("classes", features=20, classes=3)
IMAGES = make_shape("classes", channels=2, size=8, classes=5)
TEXT = make_shape("tokens", vocab_size=65, context=32)
UNKNOWN = make_shape("custom")


def problems_of(config: Any, shape: DataShape) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        build_model(config, shape)
    return [problem.what for problem in raised.value.problems]


# What follows from the data


@pytest.mark.parametrize(("shape", "inputs", "classes"), [(ROWS, (4, 20), 3), (IMAGES, (4, 2, 8, 8), 5)])
def test_an_mlp_fits_rows_and_images(shape: DataShape, inputs: tuple[int, ...], classes: int) -> None:
    model = build_model(MLPModelConfig(kind="mlp", hidden_dim=8, dropout=0.1), shape)
    assert isinstance(model, MLPClassifier)
    assert model(torch.randn(inputs)).shape == (4, classes)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.1, 0.1]


def test_a_resnet_fits_images() -> None:
    config = ResNetModelConfig(kind="resnet", depth=50, width=4, norm="group", stem="small")
    model = build_model(config, IMAGES)
    assert isinstance(model, ResNet)
    assert len(model.blocks()) == 16
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d | nn.MaxPool2d)]
    assert model(torch.randn(1, 2, 8, 8)).shape == (1, 5)


def test_a_gpt_takes_the_vocabulary_of_the_data_and_the_rest_of_its_size() -> None:
    model = build_model(GPTModelConfig(kind="gpt", size="gpt-nano", layers=2, dropout=0.25), TEXT)
    assert isinstance(model, GPT)
    found = model.config
    assert (found.vocab_size, found.context, found.layers, found.dropout) == (65, 64, 2, 0.25)
    assert (found.width, found.kv_heads) == (64, 2)


def test_a_gpt_takes_the_vocabulary_of_its_size_when_the_data_has_none() -> None:
    model = build_model(GPTModelConfig(kind="gpt", size="gpt-nano"), UNKNOWN)
    assert isinstance(model, GPT)
    assert model.config == SIZES["gpt-nano"]


def test_a_gpt_without_size_takes_vocabulary_and_context_of_the_data() -> None:
    model = build_model(GPTModelConfig(kind="gpt", layers=1, heads=2, width=8), TEXT)
    assert isinstance(model, GPT)
    assert (model.config.vocab_size, model.config.context, model.config.kv_heads) == (65, 32, 2)


def test_what_was_asked_goes_before_the_data() -> None:
    model = build_model(MLPModelConfig(kind="mlp", num_classes=7, hidden_dim=4), ROWS)
    assert model(torch.randn(1, 20)).shape == (1, 7)
    gpt = build_model(GPTModelConfig(kind="gpt", size="gpt-nano", vocab_size=128, context=32), TEXT)
    assert isinstance(gpt, GPT)
    assert (gpt.config.vocab_size, gpt.config.context) == (128, 32)


def test_custom_data_needs_no_shape_when_the_config_says_all() -> None:
    model = build_model(MLPModelConfig(kind="mlp", input_dim=6, num_classes=2, hidden_dim=4), UNKNOWN)
    assert model(torch.randn(3, 6)).shape == (3, 2)
    resnet = build_model(ResNetModelConfig(kind="resnet", in_channels=1, num_classes=2, width=4), UNKNOWN)
    assert isinstance(resnet, ResNet)


def test_the_seed_decides_the_weights() -> None:
    config = MLPModelConfig(kind="mlp", hidden_dim=4)
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(next(build_model(config, ROWS).parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_compile_is_left_to_others() -> None:
    model = build_model(GPTModelConfig(kind="gpt", size="gpt-nano", compile=True), TEXT)
    assert all(module._compiled_call_impl is None for module in model.modules())


# What does not fit


def test_all_fields_that_nobody_tells_are_listed() -> None:
    assert problems_of(MLPModelConfig(kind="mlp"), UNKNOWN) == [
        "model.input_dim is not set, and the data does not tell it",
        "model.num_classes is not set, and the data does not tell it",
    ]
    assert problems_of(ResNetModelConfig(kind="resnet"), UNKNOWN) == [
        "model.num_classes is not set, and the data does not tell it",
        "model.in_channels is not set, and the data does not tell it",
    ]
    assert problems_of(GPTModelConfig(kind="gpt", layers=2), UNKNOWN) == [
        "a GPT without model.size lacks model.heads, model.width, model.context, model.vocab_size"
    ]


def test_a_config_that_contradicts_the_data_is_refused() -> None:
    assert problems_of(MLPModelConfig(kind="mlp", input_dim=19, num_classes=2), ROWS) == [
        "model.input_dim = 19, but the data has 20 features of a sample",
        "model.num_classes = 2 is fewer than the data's 3 classes",
    ]
    assert problems_of(ResNetModelConfig(kind="resnet", in_channels=3), IMAGES) == [
        "model.in_channels = 3, but the data has 2 channels of an image"
    ]
    assert problems_of(GPTModelConfig(kind="gpt", size="gpt-nano", vocab_size=64, context=16), TEXT) == [
        "model.vocab_size = 64 is fewer than the data's 65 tokens of the vocabulary",
        "model.context = 16, but a sample of the data has 32 tokens",
    ]


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MLPModelConfig(kind="mlp"), TEXT),
        (ResNetModelConfig(kind="resnet"), TEXT),
        (GPTModelConfig(kind="gpt", size="gpt-nano"), ROWS),
    ],
)
def test_a_model_for_another_kind_of_data_is_refused(config: Any, shape: DataShape) -> None:
    assert f"model.kind = {config.kind} needs data of" in problems_of(config, shape)[0]


def test_a_resnet_refuses_flat_rows() -> None:
    whats = problems_of(ResNetModelConfig(kind="resnet", in_channels=1), ROWS)
    assert whats == ["model.kind = resnet, but a sample of the data is a flat row of 20 features"]


def test_dimensions_that_do_not_fit_are_the_configs_problem() -> None:
    whats = problems_of(GPTModelConfig(kind="gpt", size="gpt-nano", width=66), TEXT)
    assert whats == ["model.width = 66 is not a multiple of model.heads = 4"]


# Factories


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a module of a user in the current directory; returns its name, new for each test."""
    name = f"nets_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear): pass\n"
        "def build(width, depth=1):\n"
        "    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))\n"
        "def broken(): raise RuntimeError('no weights here')\n"
        "def forgets(): nn.Linear(1, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_factory_gets_its_arguments(nets: str) -> None:
    config = FactoryModelConfig(kind="factory", factory=f"{nets}:build", args={"width": 3, "depth": 2})
    model = build_model(config, UNKNOWN)
    assert isinstance(model, nn.Sequential)
    assert num_parameters(model) == 2 * 12


def test_a_class_is_a_factory(nets: str) -> None:
    args = {"in_features": 2, "out_features": 3}
    model = build_model(FactoryModelConfig(kind="factory", factory=f"{nets}:Net", args=args), TEXT)
    assert type(model).__name__ == "Net"


def test_a_factory_that_raises_is_named_and_its_error_kept(nets: str) -> None:
    with pytest.raises(UsageError, match=rf"{nets}:broken' raised RuntimeError: no weights here") as raised:
        build_model(FactoryModelConfig(kind="factory", factory=f"{nets}:broken"), UNKNOWN)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_wrong_arguments_are_shown(nets: str) -> None:
    with pytest.raises(UsageError, match=r"unexpected keyword argument 'widht'.*\n.*model\.args = \{'widht': 3\}"):
        build_model(FactoryModelConfig(kind="factory", factory=f"{nets}:build", args={"widht": 3}), UNKNOWN)


def test_a_factory_that_returns_no_module_is_refused(nets: str) -> None:
    with pytest.raises(UsageError, match=rf"{nets}:forgets' returned NoneType\n.*must return a torch.nn.Module"):
        build_model(FactoryModelConfig(kind="factory", factory=f"{nets}:forgets"), UNKNOWN)


def test_a_factory_that_is_not_there_is_the_importers_error(nets: str) -> None:
    with pytest.raises(UsageError, match=r"model\.factory = .* did you mean build\?|has no 'biuld'"):
        build_model(FactoryModelConfig(kind="factory", factory=f"{nets}:biuld"), UNKNOWN)


# Blocks


class Tower(nn.Module):
    """A model that says nothing about its blocks."""

    def __init__(self, *rows: nn.Module) -> None:
        super().__init__()
        self.rows = nn.ModuleDict({f"row{index}": row for index, row in enumerate(rows)})


def test_blocks_are_what_the_model_says() -> None:
    class Says(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.many = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))

        def blocks(self) -> tuple[nn.Module, ...]:
            return (self.second, self.first)

    model = Says()
    assert model_blocks(model) == [model.second, model.first]


def test_blocks_are_else_the_largest_row_of_one_type() -> None:
    small = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    large = nn.Sequential(*(nn.Linear(9, 9) for _ in range(2)))
    mixed = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50))
    alone = nn.ModuleList([nn.Linear(50, 50)])
    assert model_blocks(Tower(small, large, mixed, alone)) == list(large)


def test_rows_without_parameters_are_no_blocks() -> None:
    assert model_blocks(Tower(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ModuleList())) == []


def test_an_attribute_named_blocks_is_no_method() -> None:
    model = nn.Module()
    model.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert model_blocks(model) == list(model.blocks)


def test_blocks_that_are_no_modules_are_refused() -> None:
    class Odd(nn.Module):
        def blocks(self) -> list[int]:
            return [3]

    with pytest.raises(UsageError, match=r"Odd\.blocks\(\) returned \['int'\]"):
        model_blocks(Odd())


def test_shared_parameters_count_once() -> None:
    first = nn.Linear(3, 3, bias=False)
    second = nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    assert num_parameters(nn.Sequential(first, second)) == 9
