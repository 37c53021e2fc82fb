"""Keys and values of the tokens that a model has read: with them, the next token costs one token and not all before it.

A layer of L tokens, batch b and k heads of width d for keys and values keeps 2 b L k d numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KeyValues:
    """What the attention layers of one model keep while it writes. ``length``: the tokens that it has read."""

    def __init__(self) -> None:
        self.length = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def add(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of new tokens, (batch, heads, length, head_dim), to a layer's; returns all of them."""
        if layer in self._kept:
            before = self._kept[layer]
            key, value = torch.cat((before[0], key), dim=2), torch.cat((before[1], value), dim=2)
        self._kept[layer] = key, value
        return key, value
