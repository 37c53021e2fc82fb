"""The FLOPs of a model: formula and count agree, and to count changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.config import Config, config_from_dict
from paceline.data.datasets import DataShape, TensorPairs
from paceline.data.fetch import fetch_batch
from paceline.data.registry import DataSplits
from paceline.models.gpt import GPT, gpt_config
from paceline.models.resnet import ResNet
from paceline.train.loss import CrossEntropy, CustomLoss
from paceline.train.resolve import cost_of_sample, count_flops, on_meta, sample_flops


def own_model(kind: str = "factory", **sections: Any) -> Config:
    model: dict[str, Any] = {"kind": "factory", "factory": "nothing:here"} if kind == "factory" else {"kind": kind}
    data = {"kind": "factory", "factory": "nothing:here"}
    return config_from_dict({"model": model, "data": data, "train": {"steps": 1}, **sections})


def rows_of(features: int, classes: int = 4) -> DataSplits:
    pairs = TensorPairs(torch.zeros(3, features), torch.zeros(3, dtype=torch.int64))
    return DataSplits(train=pairs, eval=None, shape=DataShape(kind="classes", features=features, classes=classes))


def tokens_of(context: int) -> DataSplits:
    pairs = TensorPairs(*(torch.zeros(3, context, dtype=torch.int64) for _ in range(2)))
    return DataSplits(train=pairs, eval=None, shape=DataShape(kind="tokens", vocab_size=32, context=context))


@pytest.mark.parametrize("size", ["gpt-nano", "gpt-micro"])  # grouped keys and values, and all of them
def test_the_formula_of_a_gpt_is_what_its_products_add_up_to(size: str) -> None:
    model, data = GPT(gpt_config(size, layers=2, dropout=0.0, vocab_size=32)), tokens_of(16)
    counted = count_flops(model, CrossEntropy(16.0), fetch_batch(data.train, np.arange(2))) / 2
    config = own_model("gpt", model={"kind": "gpt", "size": size, "layers": 2})
    assert sample_flops(config, data, model) == pytest.approx(counted)


def test_a_model_of_the_users_own_is_counted_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    # Two for each weight forward, as many for its gradient, and as many for what the second layer hands back.
    assert sample_flops(own_model(), rows_of(8), model) == 2 * (2 * 8 * 16 + 3 * 16 * 4)
    model[0].requires_grad_(requires_grad=False)  # nothing is handed back to it, and it has no gradient
    assert sample_flops(own_model(), rows_of(8), model) == 2 * (8 * 16 + 2 * 16 * 4)


class Attending(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.linear, self.is_causal = nn.Linear(8, 4), is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = self.linear(x).view(1, 1, -1, 4)
        return nn.functional.scaled_dot_product_attention(row, row, row, is_causal=self.is_causal).view(-1, 4)


def test_of_causal_attention_half_of_the_square_counts() -> None:
    batch = (torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64))
    square = 3 * 2 * 2 * 6 * 6 * 4  # forward and twice for backward, two products
    linear = 2 * 2 * 6 * 8 * 4
    assert count_flops(Attending(is_causal=False), CrossEntropy(1.0), batch) == linear + square
    assert count_flops(Attending(is_causal=True), CrossEntropy(1.0), batch) == linear + square / 2


class Caching(nn.Module):
    """Keeps a tensor of its first pass, and counts batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.mask: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, device=inputs.device)
        hidden: torch.Tensor = self.norm(self.linear(inputs))
        return hidden * self.mask * torch.rand(1, device=inputs.device)


def test_to_count_leaves_the_model_and_random_states_alone() -> None:
    model = Caching()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert sample_flops(own_model(), rows_of(8), model) == 2 * 2 * 8 * 4
    assert model.mask is None
    assert model.norm.num_batches_tracked == 0
    assert not any(each.is_meta or each.grad is not None for each in model.parameters())
    assert torch.equal(torch.rand(2), expected)


def test_a_model_that_looks_at_values_is_not_counted() -> None:
    class Looking(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * inputs.sum().item()

    assert sample_flops(own_model(), rows_of(4), Looking()) is None


def test_shared_weights_stay_shared_on_meta() -> None:
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    shadow = on_meta(nn.Sequential(first, second))
    assert shadow[0].weight is shadow[1].weight  # type: ignore[index]
    assert shadow[0].weight.is_meta  # type: ignore[index]
    assert not first.weight.is_meta


def test_a_loss_of_the_users_own_is_counted_with_its_model() -> None:
    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch[0]).sum(), len(batch[0])

    assert count_flops(nn.Linear(8, 4), CustomLoss(loss, "mine:loss"), rows_of(8).train[0]) == 2 * 2 * 8 * 4


def test_a_sample_counts_as_tokens_images_or_itself() -> None:
    gpt = GPT(gpt_config("gpt-nano", vocab_size=32))
    tokens = cost_of_sample(own_model("gpt", model={"kind": "gpt", "size": "gpt-nano"}), tokens_of(16), gpt)
    assert (tokens.unit, tokens.units) == ("tokens", 16.0)
    images = TensorPairs(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))
    shape = DataShape(kind="classes", channels=3, size=8, classes=10)
    pictures = DataSplits(train=images, eval=None, shape=shape)
    found = cost_of_sample(own_model(), pictures, ResNet(18, 10, width=4, stem="small"))
    assert (found.unit, found.units) == ("images", 1.0)
    assert found.flops is not None
    assert cost_of_sample(own_model(), rows_of(8), nn.Linear(8, 4)).unit == "samples"
