"""Stages: a model cut in parts that keep its names and values, and train under every engine."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from covering import covering
from torch import Tensor, nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.stages.stages import Stage, split_model, tied_names
from paceline.errors import UsageError
from paceline.models.gpt import GPT
from paceline.models.layers import PipelineLayer, model_layers
from paceline.models.mlp import MLPClassifier
from paceline.models.resnet import ResNet
from paceline.plan.model_shape import ModelShape

SMALL = {"layers": 3, "heads": 2, "kv_heads": 1, "width": 16, "mlp_width": 24, "context": 8, "vocab_size": 11}


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(5)
    return GPT(ModelShape(**{**SMALL, **changes}))


def tied_sequential() -> nn.Sequential:
    torch.manual_seed(5)
    embedding, head = nn.Embedding(7, 5), nn.Linear(5, 7)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(5, 5), nn.ReLU(), head)


def inputs_of(model: nn.Module) -> Tensor:
    torch.manual_seed(6)
    if isinstance(model, GPT):
        return torch.randint(0, 11, (4, 8))
    if isinstance(model, ResNet):
        return torch.randn(4, 3, 8, 8)
    return torch.randint(0, 7, (4, 3)) if isinstance(model, nn.Sequential) else torch.randn(4, 12)


MODELS = {
    "gpt": gpt,
    "tied gpt": lambda: gpt(tied=True, positions="learned", norm="layer"),
    "resnet": lambda: ResNet(18, num_classes=3, width=2, stem="small"),
    "mlp": lambda: MLPClassifier(12, 8, 3, dropout=0.0),
    "tied sequential": tied_sequential,
}


def separate(model: nn.Module, bounds: tuple[int, ...]) -> list[Stage]:
    """The stages as if each were on a rank of its own."""
    return [split_model(copy.deepcopy(model), bounds, [index])[index] for index in range(len(bounds) - 1)]


def every_cut(model: nn.Module) -> list[tuple[int, ...]]:
    num = len(model_layers(model))
    cuts = [c for size in range(3) for c in itertools.combinations(range(1, num), size)]
    return [(0, *cut, num) for cut in cuts[:: max(1, len(cuts) // 4)]]


@pytest.mark.parametrize("kind", MODELS)
def test_stages_compute_what_the_model_does_under_its_names(kind: str) -> None:
    model = MODELS[kind]()
    x = inputs_of(model)
    want, state = model(x), model.state_dict()
    for bounds in every_cut(model):
        stages = separate(model, bounds)
        out = x
        for stage in stages:
            out = stage(out)
        torch.testing.assert_close(out, want, rtol=0, atol=0)
        found = {name for stage in stages for name in stage.state_dict()}
        assert found == set(state)
        owners: dict[str, tuple[int, ...]] = {}
        for stage in stages:
            for name, _ in stage.named_parameters():
                owners[name] = (*owners.get(name, ()), stage.index)
        assert set(owners) == {name for name, _ in model.named_parameters()}
        assert {name: places for name, places in owners.items() if len(places) > 1} == tied_names(model, bounds)
        buffers = [name for stage in stages for name, _ in stage.named_buffers()]
        assert sorted(buffers) == sorted(name for name, _ in model.named_buffers())


def test_parameters_and_buffers_keep_the_model_s_order() -> None:
    model = gpt(tied=True, positions="learned")
    last = separate(model, (0, 2, 5))[1]
    order = [name for name, _ in model.named_parameters()]
    names = [name for name, _ in last.named_parameters()]
    assert names[0] == "token_embedding.weight"
    assert names == [name for name in order if name in names]
    assert list(last.state_dict()) == [name for name in model.state_dict() if name in last.state_dict()]


def test_a_tied_parameter_is_known_by_its_first_name_on_the_other_rank_too() -> None:
    first, last = separate(tied_sequential(), (0, 2, 3))
    assert [name for name, _ in first.named_parameters()] == ["0.weight", "1.weight", "1.bias"]
    assert [name for name, _ in last.named_parameters()] == ["0.weight", "3.bias"]
    assert list(last.state_dict()) == ["0.weight", "3.weight", "3.bias"]


@pytest.mark.parametrize("kind", ["tied gpt", "tied sequential"])
def test_of_a_rank_s_own_stages_the_first_owns_a_tied_parameter(kind: str) -> None:
    model = MODELS[kind]()
    x, num = inputs_of(model), len(model_layers(model))
    whole = copy.deepcopy(model)
    whole(x).square().sum().backward()
    stages = split_model(model, (0, 1, num), [1, 0])
    tied = {"tied gpt": "token_embedding.weight", "tied sequential": "0.weight"}[kind]
    assert tied in dict(stages[0].named_parameters())
    assert tied not in dict(stages[1].named_parameters())
    both = [name for stage in stages.values() for name, _ in stage.named_parameters()]
    assert sorted(both) == sorted(name for name, _ in whole.named_parameters())
    stages[1](stages[0](x)).square().sum().backward()
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)


def test_what_no_kept_stage_uses_is_freed() -> None:
    model = gpt(tied=True)
    stage = split_model(model, (0, 2, 5), [1])[1]
    kept = {name for name, _ in stage.named_parameters()}
    assert {name for name, p in model.named_parameters() if not p.is_meta} == kept
    assert {n for n, b in model.named_buffers() if not b.is_meta} == {n for n, _ in stage.named_buffers()}
    assert model.layers[0].get_parameter("attention.query.weight").requires_grad


def test_a_frozen_parameter_stays_frozen() -> None:
    model = gpt()
    model.layers[0].requires_grad_(False)
    stage = split_model(model, (0, 2, 5), [0])[0]
    frozen = [name for name, parameter in stage.named_parameters() if not parameter.requires_grad]
    assert frozen
    assert all(name.startswith("layers.0.") for name in frozen)


def test_modes_reach_dropout_and_the_modules_around() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

        def start(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.inner["a"](x), 0.5, self.training)

        def pipeline_layers(self) -> list[PipelineLayer]:
            a, b = self.inner["a"], self.inner["b"]
            return [
                PipelineLayer(name="inner.a", run=self.start, modules=(a,)),
                PipelineLayer(name="inner.b", run=b, modules=(b,)),
            ]

    model = Odd()
    stage = split_model(model, (0, 1, 2), [0])[0].eval()
    x = torch.randn(8, 3)
    torch.testing.assert_close(stage(x), model.inner["a"](x), rtol=0, atol=0)
    assert (stage.train()(x) == 0).any()
    drops = gpt(dropout=0.5)
    first = split_model(drops, (0, 2, 5), [0])[0].eval()
    assert not any(module.training for module in first.modules())
    assert drops.dropout.training is False
    first.train()
    assert drops.dropout.training


def test_names_of_the_model_and_of_the_stage_do_not_collide() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.index = nn.Linear(3, 3)
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def pipeline_layers(self) -> list[PipelineLayer]:
            row = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
            return [PipelineLayer(name=n, run=m, modules=(m,)) for n, m in [("index", self.index), *row]]

    model = Clash()
    stage = split_model(model, (0, 2, 3), [0])[0]
    assert list(stage.state_dict()) == ["index.weight", "index.bias", "blocks.0.weight", "blocks.0.bias"]
    assert stage.index == 0
    assert stage.blocks() == [model.blocks[0]]
    assert stage.get_submodule("index") is model.index
    assert stage.get_parameter("blocks.0.weight") is model.blocks[0].weight
    with pytest.raises(AttributeError, match=r"no module 'blocks\.1'"):
        stage.get_submodule("blocks.1")
    stage.load_state_dict({name: torch.zeros_like(value) for name, value in stage.state_dict().items()})
    assert not model.index.weight.any()


def test_blocks_and_ends_are_those_inside() -> None:
    model = gpt()
    first, last = separate(model, (0, 2, 5))
    assert len(first.blocks()) == 1
    assert len(last.blocks()) == 2
    assert [type(end).__name__ for end in first.ends()] == ["Embedding"]
    assert [type(end).__name__ for end in last.ends()] == ["Head"]
    assert (first.index, first.num_stages, last.index, last.num_stages) == (0, 2, 1, 2)
    assert "stage 1 of 2: layers.1, layers.2, norm" in repr(last)
    assert [stage.ends() for stage in separate(gpt(tied=True), (0, 2, 5))] == [[], []]


@pytest.mark.parametrize(
    ("bounds", "keep", "text"),
    [
        ((0, 5, 3), [0], "bounds (0, 5, 3) of 5 layers"),
        ((0, 3, 3, 5), [0], "at least one"),
        ((0, 4), [0], "end with 5"),
        ((1, 5), [0], "begin with 0"),
        ((0, 2, 5), [2], "stage 2 of 2"),
    ],
)
def test_bounds_that_do_not_fit_are_named(bounds: tuple[int, ...], keep: list[int], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_model(gpt(), bounds, keep)
    assert text in str(caught.value)


# A stage under the engines: two ranks train it by itself, as one process would.


def train_alone(
    comm: Communicator, strategy: str, tied: bool, where: int, bounds: tuple[int, ...]
) -> dict[str, Tensor]:
    stage = split_model(gpt(tied=tied).double(), bounds, [where])[where]
    engine = parallelize(stage, comm, strategy, bucket_mb=0.001, first_bucket_mb=0.001)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x: Tensor = torch.randn(4, 8, 16, generator=generator, dtype=torch.float64).requires_grad_()
        if stage.index == 0:
            x = torch.randint(0, 11, (4, 8), generator=generator)
        mine = x[comm.rank * (4 // comm.size) : (comm.rank + 1) * (4 // comm.size)]
        engine(mine).square().mean().backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return engine.full_state_dict()


@covering(
    stage={
        "tied last": (True, 1, (0, 2, 5)),
        "tied head alone": (True, 2, (0, 1, 4, 5)),
        "tied embedding alone": (True, 0, (0, 1, 5)),
        "head alone": (False, 1, (0, 4, 5)),
    },
    strategy=["ddp", "zero1", "zero2", "fsdp"],
)
def test_a_stage_trains_under_every_engine(stage: tuple[bool, int, tuple[int, ...]], strategy: str) -> None:
    tied, where, bounds = stage
    want = run_virtual(lambda comm: train_alone(comm, "ddp", tied, where, bounds), 1)[0]
    for found in run_virtual(lambda comm: train_alone(comm, strategy, tied, where, bounds), 2):
        assert list(found) == list(want)
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
