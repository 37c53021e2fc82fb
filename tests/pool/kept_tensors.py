"""Models and tensors as figures that are the same on every machine: weights by formula, and sums that say a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def fill(model: nn.Module) -> Any:
    """Gives all parameters values by formula: what is drawn by chance is other numbers on other machines."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((0.3 * torch.sin(values * 0.37 + number)).reshape(parameter.shape))
    return model


def row(length: int, number: int = 1) -> Tensor:
    return (torch.arange(2 * length).reshape(2, length) * (number + 2) + number) % 31


def sums(tensor: Tensor | None) -> object:
    """A few numbers that say a tensor: its shape, its sum, and a sum in which every place counts otherwise."""
    if tensor is None:
        return None
    flat = tensor.detach().to(torch.float64).reshape(-1)
    weights = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.7)
    return [list(tensor.shape), float(flat.abs().sum()), float((flat * weights).sum())]


def gradients(model: nn.Module) -> object:
    return {name: sums(parameter.grad) for name, parameter in model.named_parameters()}
