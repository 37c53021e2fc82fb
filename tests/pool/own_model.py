"""A model of the user's own code: none that Paceline knows by name, so that it has to be measured."""

from __future__ import annotations

import torch
from torch import nn


class Own(nn.Module):
    """Four equal blocks; looks at values if it is told to, which a model without values cannot answer."""

    def __init__(self, curious: bool = False, *, width: int = 1024) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, 10)
        self.curious = curious

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.curious and x.sum().item() > 0:
            x = -x
        for layer in self.layers:
            x = layer(x).relu()
        result: torch.Tensor = self.last(x)
        return result
