"""A small transformer of torch's own layers in float64, a batch for some ranks, and a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, LENGTH, SAMPLES = 8, 5, 2


class SmallEncoder(nn.Module):
    """Two layers of torch's encoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.encoder(self.tokens(tokens))))
        return out


def build() -> Any:
    torch.manual_seed(4)
    return SmallEncoder().double()


def batch_of(ranks: tuple[int, ...]) -> torch.Tensor:
    generators = (torch.Generator().manual_seed(rank) for rank in ranks)
    return torch.cat([torch.randint(0, 13, (SAMPLES, LENGTH), generator=each) for each in generators])


def train_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    logits = model(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
    optimizer.step()
