"""A multi-layer perceptron for classification: the smallest model that shows everything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.layers import Chain, PipelineLayer, sequential_layers

_FORMER = {"layers.1": "layers.0", "layers.4": "layers.3", "layers.7": "layers.6"}  # a Flatten was the first of them
_RENAMED = {f"{old}.{kind}": f"{new}.{kind}" for old, new in _FORMER.items() for kind in ("weight", "bias")}


class MLPClassifier(nn.Module):
    """Maps inputs of any shape (batch, ...) to logits; the hidden layers are hidden_dim and hidden_dim // 2 wide."""

    def __init__(
        self, input_dim: int = 784, hidden_dim: int = 512, num_classes: int = 10, dropout: float = 0.3
    ) -> None:
        super().__init__()
        if input_dim < 1 or hidden_dim < 2 or num_classes < 1:
            what = f"MLPClassifier got input_dim = {input_dim}, hidden_dim = {hidden_dim}, num_classes = {num_classes}"
            rule = "every layer needs a unit, and the second hidden layer has half of hidden_dim"
            raise UsageError(f"{what}\n  {rule}\n  give input_dim >= 1, hidden_dim >= 2 and num_classes >= 1")
        self.flatten = nn.Flatten()
        self.layers = nn.Sequential(
            nn.Linear(input_dim, hidden_dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, hidden_dim // 2),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim // 2, num_classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return cast("Tensor", self.layers(self.flatten(inputs)))

    def pipeline_layers(self) -> tuple[PipelineLayer, ...]:
        """Returns the three linear layers, each with what follows it: where a pipeline may cut."""
        first, *others = sequential_layers(self.layers, "layers.")
        modules = (self.flatten, *first.modules)
        return (PipelineLayer(name=first.name, run=Chain(modules), modules=modules), *others)

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.empty(1, cast("nn.Linear", self.layers[0]).in_features, device="meta"),)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for old, new in _RENAMED.items():
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        super()._load_from_state_dict(state_dict, prefix, *args)


def former_names(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Returns the names that a classifier's weights had before, with those of today; none for other weights."""
    return _RENAMED if set(saved) == set(_RENAMED) and set(wanted) == set(_RENAMED.values()) else {}
