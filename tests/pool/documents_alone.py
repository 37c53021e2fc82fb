"""Attention of documents one by one, which packed rows are compared with, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def starts_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns where the document of each token begins, for rows of documents by their lengths."""
    starts = [torch.tensor(row).cumsum(0) - torch.tensor(row) for row in rows]
    return torch.stack([start.repeat_interleave(torch.tensor(row)) for start, row in zip(starts, rows, strict=True)])


def one_by_one(inputs: Sequence[Tensor], rows: Sequence[Sequence[int]], **options: Any) -> Tensor:
    found = []
    for number, row in enumerate(rows):
        parts = zip(*(each[number : number + 1].split(list(row), dim=2) for each in inputs), strict=True)
        found.append(
            torch.cat([F.scaled_dot_product_attention(*part, enable_gqa=True, **options) for part in parts], 2)
        )
    return torch.cat(found)


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device).view_as(output)
    return list(torch.autograd.grad(output, inputs, weights.to(output.dtype)))
