"""What the tests of NCCL ranks share: their parameters, and values that travel from a GPU to the tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from paceline.records.records import StepRecord
from paceline.verify.runs import StepValues

NCCL = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        pytest.mark.timeout(100),
    ],
)
GLOO = pytest.param("gloo")
GLOO_TOO = pytest.param("gloo", marks=pytest.mark.exhaustive)
STARTED_TOO = pytest.param("started", marks=pytest.mark.exhaustive)


def to_host(tree: Any) -> Any:
    """Returns a tree of values with all tensors on the CPU: the tests' process leaves the GPU alone."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def step_to_host(values: StepValues) -> StepValues:
    """Returns what a step computed, on the CPU."""
    return dataclasses.replace(values, **{f.name: to_host(getattr(values, f.name)) for f in dataclasses.fields(values)})


def mean_losses(per_rank: Sequence[Sequence[StepRecord]]) -> list[float]:
    """Returns the loss of each step over all ranks: a rank's record has its own share."""
    together = zip(*per_rank, strict=True)
    return [sum(each.loss_sum for each in step) / sum(each.count for each in step) for step in together]
