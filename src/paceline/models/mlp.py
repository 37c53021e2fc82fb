"""A multi-layer perceptron for classification: the smallest model that shows everything."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.layers import PipelineLayer, sequential_layers


class MLPClassifier(nn.Module):
    """Maps inputs of any shape (batch, ...) to logits (batch, num_classes) through two hidden layers.

    The widths are ``input_dim``, ``hidden_dim``, ``hidden_dim // 2``, ``num_classes``; dropout follows hidden layers.
    """

    def __init__(
        self, input_dim: int = 784, hidden_dim: int = 512, num_classes: int = 10, dropout: float = 0.3
    ) -> None:
        super().__init__()
        if input_dim < 1 or hidden_dim < 2 or num_classes < 1:
            raise UsageError(
                f"MLPClassifier got input_dim = {input_dim}, hidden_dim = {hidden_dim}, num_classes = {num_classes}\n"
                "  every layer needs a unit, and the second hidden layer has half of hidden_dim\n"
                "  give input_dim >= 1, hidden_dim >= 2 and num_classes >= 1"
            )
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(input_dim, hidden_dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, hidden_dim // 2),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim // 2, num_classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the logits of each class."""
        return cast("Tensor", self.layers(inputs))

    def pipeline_layers(self) -> tuple[PipelineLayer, ...]:
        """Returns the three linear layers, each with what follows it: where a pipeline may cut."""
        return sequential_layers(self.layers, "layers.")

    def example_inputs(self) -> tuple[Tensor]:
        """Returns arguments of ``forward`` for one sample, without values."""
        return (torch.empty(1, cast("nn.Linear", self.layers[1]).in_features, device="meta"),)
