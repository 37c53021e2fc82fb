"""What layers cost where they cannot be run without values: by their parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.engines.stages.costs import estimate_layers
from paceline.models.layers import PipelineLayer


class Opaque(nn.Module):
    """A linear layer whose forward reads a value: it cannot be run on tensors without them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(inputs) if float(inputs.sum()) > -1e9 else inputs
        return found


def test_a_table_is_looked_up_at_first_and_multiplied_where_it_comes_again() -> None:
    table, body = nn.Embedding(100, 8), Opaque(nn.Linear(8, 8))
    layers = [
        PipelineLayer(name="table", modules=(table,), run=table),
        PipelineLayer(name="body", modules=(body,), run=body),
        PipelineLayer(name="head", modules=(table,), run=table),
    ]
    found = {cost.name: cost for cost in estimate_layers(nn.ModuleList([table, body]), layers)}
    assert found["table"].forward == 2 * 8  # a row of the table
    assert found["body"].forward == 2 * (64 + 8)
    assert found["head"].forward == 2 * 800  # all of it
    assert all(cost.backward == 2 * cost.forward for cost in found.values())


def test_what_a_layer_has_twice_is_counted_once() -> None:
    shared = nn.Linear(4, 4, bias=False)
    both = nn.Sequential(shared, shared)
    (found,) = estimate_layers(both, [PipelineLayer(name="both", modules=(both,), run=Opaque(both))])
    assert found.forward == 2 * 16
    assert torch.is_tensor(shared.weight)
