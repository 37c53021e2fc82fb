"""What layers cost: counted without values, and timed without a trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.engines.stages import costs
from paceline.engines.stages.costs import estimate_layers, measure_layers
from paceline.errors import UsageError
from paceline.models.gpt import GPT
from paceline.models.layers import PipelineLayer
from paceline.models.mlp import MLPClassifier
from paceline.models.resnet import ResNet
from paceline.plan.model_shape import ModelShape
from paceline.predict.memory.facts import choose_bounds


def gpt(**changes: Any) -> GPT:
    shape = {"layers": 2, "heads": 2, "kv_heads": 2, "width": 16, "mlp_width": 32, "context": 8, "vocab_size": 64}
    return GPT(ModelShape(**{**shape, **changes}))


def test_the_embedding_is_cheap_and_the_head_is_not() -> None:
    embedding, *blocks, head = estimate_layers(gpt(vocab_size=4096, tied=True))
    assert blocks[0].total == blocks[1].total > embedding.total
    assert head.forward > 2 * 8 * 16 * 4096  # a product of 8 tokens with the whole vocabulary
    assert head.backward == 2 * head.forward
    assert embedding.state_bytes == 4 * 4 * 4096 * 16


def test_activations_grow_with_the_samples_and_states_do_not() -> None:
    model = gpt()
    one, two = (estimate_layers(model, inputs=(torch.zeros(n, 8, dtype=torch.int64),)) for n in (1, 2))
    assert all(2 * a.activation_bytes == b.activation_bytes > 0 for a, b in zip(one[1:-1], two[1:-1], strict=True))
    assert [cost.state_bytes for cost in one] == [cost.state_bytes for cost in two]


def test_a_large_head_gets_a_stage_with_fewer_blocks() -> None:
    small, large = (estimate_layers(gpt(layers=6, vocab_size=vocab)) for vocab in (8, 2048))
    assert choose_bounds(small, 2) == (0, 4, 8)
    assert choose_bounds(large, 2)[1] > 4


def test_convolutions_are_judged_by_their_images_too() -> None:
    found = estimate_layers(ResNet(18, num_classes=10, width=16, stem="small"))
    blocks = found[1:-1]
    assert blocks[-1].state_bytes > 50 * blocks[0].state_bytes
    assert max(b.total for b in blocks) < 3 * min(b.total for b in blocks)


@pytest.mark.parametrize("kind", [int, list, nn.Module])
def test_layers_of_the_same_shapes_cost_what_their_attributes_say(kind: type) -> None:
    class Block(nn.Module):
        def __init__(self, products: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))
            self.products: Any = products if kind is int else [products]
            if kind is nn.Module:
                self.products = 1
                self.register_forward_hook(lambda _, __, output: sum(output @ output.T for _ in range(products)))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.products if isinstance(self.products, int) else self.products[0]):
                x = x @ self.weight
            return x

    layers = [Block(products) for products in (1, 1, 3)]
    rows = [PipelineLayer(name=str(i), run=layer, modules=(layer,)) for i, layer in enumerate(layers)]
    first, same, other = estimate_layers(nn.Sequential(*layers), rows, (torch.zeros(8, 8),))
    assert first.forward == same.forward < other.forward


@pytest.mark.parametrize("model", [gpt(layers=5, tied=True), ResNet(18, num_classes=3, width=2, stem="small")])
def test_a_layer_that_is_like_another_is_not_run_again(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[int] = []
    count = costs._count
    monkeypatch.setattr(costs, "_count", lambda *arguments: (run.append(1), count(*arguments))[1])
    found = estimate_layers(model)
    assert len(run) < len(found)
    run.clear()
    monkeypatch.setattr(costs, "_likeness", lambda *_: object())
    assert estimate_layers(model) == found
    assert len(run) == len(found)


def test_a_model_on_the_meta_device_costs_the_same() -> None:
    with torch.device("meta"):
        model = gpt()
    assert estimate_layers(model) == estimate_layers(gpt())
    with pytest.raises(UsageError, match="cannot be timed"):
        measure_layers(model, (torch.zeros(1, 8, dtype=torch.int64),))


def test_estimates_leave_the_model_as_it_is() -> None:
    model = ResNet(18, num_classes=3, width=2, stem="small")
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    estimate_layers(model)
    for name, value in model.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])


def test_without_example_inputs_parameters_decide() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 4), nn.Linear(4, 50, bias=False)
            self.head.weight = self.table.weight

        def pipeline_layers(self) -> list[PipelineLayer]:
            return [PipelineLayer(name=n, run=m, modules=(m,)) for n, m in self.named_children()]

    table, head = estimate_layers(Own())
    assert (table.forward, head.forward) == (2.0 * 4, 2.0 * 200)


def test_a_layer_that_looks_at_values_is_told() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def look(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum().item() > 0 else x

        def pipeline_layers(self) -> list[PipelineLayer]:
            return [PipelineLayer(name="inner", run=self.look, modules=(self.inner,))]

    with pytest.raises(UsageError, match="cannot be run without values"):
        estimate_layers(Looks(), inputs=(torch.ones(1, 2),))
    (cost,) = measure_layers(Looks(), (torch.ones(1, 2),), repeats=1, warmup=0)
    assert cost.forward > 0


@pytest.mark.parametrize("kind", ["gpt", "resnet", "mlp"])
def test_measuring_times_every_layer_and_leaves_no_trace(kind: str) -> None:
    torch.manual_seed(0)
    model, x = {
        "gpt": (gpt(dropout=0.5, tied=True), torch.zeros(2, 8, dtype=torch.int64)),
        "resnet": (ResNet(18, num_classes=3, width=2, stem="small"), torch.randn(2, 3, 8, 8)),
        "mlp": (MLPClassifier(12, 8, 3), torch.randn(2, 12)),
    }[kind]
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = measure_layers(model, (x,), repeats=3)
    assert [cost.name for cost in found] == [cost.name for cost in estimate_layers(model)]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in found)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    first, *others = model.parameters()
    assert first.grad is not None
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(parameter.grad is None for parameter in others)
