"""Saved tensors are counted once each, in the block that saves them, on real, fake and meta tensors alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.models.measured import BlockBytes, measure_activations, measure_model


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 4)
    )


def summed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(batch).pow(2).sum()
    return total


def by_hand(samples: int) -> tuple[list[BlockBytes], int]:
    """The input of a linear layer, the output of a ReLU, which is the next one's input; the loss saves the logits."""
    row = samples * 4
    first = BlockBytes(saved=row * (8 + 16), inputs=row * 8, products=row * 16)
    return [first, BlockBytes(saved=row * 16, inputs=row * 16, products=row * 16)], row * 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counts_are_those_of_a_calculation_by_hand(device: str) -> None:
    with torch.device(device):
        model = make_model()
    found = measure_activations(model, summed, torch.zeros(6, 8, device=device), [model[0], model[1]])
    blocks, outside = by_hand(6)
    assert list(found.blocks) == blocks
    assert found.outside == outside
    assert found.total == outside + sum(block.saved for block in blocks)
    assert found.largest == 6 * 16 * 4


def test_nothing_is_allocated_for_fake_tensors() -> None:
    with FakeTensorMode():
        model = make_model()
        found = measure_activations(model, summed, torch.zeros(6, 8), [model[0], model[1]])
    assert list(found.blocks) == by_hand(6)[0]


def test_parameters_buffers_and_views_do_not_count() -> None:
    model = nn.Linear(8, 8)
    model.register_buffer("scale", torch.ones(8))

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        hidden = model(batch)
        return ((hidden * model.scale).view(-1) * hidden.reshape(-1)).sum()  # saves hidden once, for two products

    found = measure_activations(model, loss, torch.zeros(4, 8))
    batch, hidden, scaled = 4 * 8 * 4, 4 * 8 * 4, 4 * 8 * 4
    assert found.total == batch + hidden + scaled


def test_a_block_inside_another_counts_for_the_outer_one() -> None:
    model = make_model()
    inner = model[0][0]
    found = measure_activations(model, summed, torch.zeros(6, 8), [model[0], inner, model[1]])
    assert list(found.blocks) == by_hand(6)[0]


def test_hooks_are_gone_afterwards() -> None:
    model = make_model()
    measure_activations(model, summed, torch.zeros(6, 8), [model[0]])
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_facts_of_a_model() -> None:
    model = make_model()
    facts = measure_model(model, summed, lambda samples: torch.zeros(samples, 8), [model[0], model[1]])
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [block.parameters for block in facts.blocks] == [8 * 16 + 16, 16 * 16 + 16]
    assert [block.saved_bytes for block in facts.blocks] == [24 * 4, 16 * 4]
    assert facts.root.saved_bytes == 4 * 4
    assert [block.cast_bytes for block in facts.blocks] == [0, 0]


def test_copies_of_weights_do_not_grow_with_the_batch() -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = make_model()
        facts = measure_model(model, summed, lambda samples: torch.zeros(samples, 8), [model[0], model[1]])
    assert [block.cast_bytes for block in facts.blocks] == [0, 2 * 16 * 16]  # no gradient for the data, no weight
    assert facts.root.cast_bytes == 2 * 16 * 4
