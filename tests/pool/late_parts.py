"""A model and its data, of which one rank takes its time in a phase that is asked for: what stragglers are tested on.

``make_model(phase=..., rank=..., seconds=...)`` and ``make_data(...)`` of the same arguments belong together.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

WIDTH, CLASSES, SAMPLES = 16, 4, 4096


def is_late(phase: str, late: str, rank: int) -> bool:
    """Says whether this process is the one that takes its time in a phase."""
    return phase == late and int(os.environ.get("RANK", "0")) == rank


class Data(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random samples, one of eight of which takes a while."""

    def __init__(self, late_s: float) -> None:
        draw = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(SAMPLES, WIDTH, generator=draw)
        self._late_s = late_s
        self._num_read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._num_read += 1
        if self._late_s and self._num_read % 8 == 0:  # once a step, as each rank has eight samples of it
            time.sleep(self._late_s)
        return self._inputs[index], torch.tensor(index % CLASSES)


class _Late(torch.autograd.Function):
    """Takes its time on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Model(torch.nn.Module):
    """Two layers, with a rest in between."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 32)
        self.second = torch.nn.Linear(32, CLASSES)
        self._forward_s, self._backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.second(self.first(x).relu())
        time.sleep(self._forward_s)
        hidden = self.first(x).relu()
        return self.second(_Late.apply(hidden, self._backward_s) if self._backward_s else hidden)


def make_model(phase: str, rank: int, seconds: float) -> Model:
    """Makes the model, and lets the optimizer rest where that is asked for."""
    if is_late("optimizer", phase, rank):
        register_optimizer_step_pre_hook(lambda *_: time.sleep(seconds))
    return Model(
        seconds if is_late("forward", phase, rank) else 0.0, seconds if is_late("backward", phase, rank) else 0.0
    )


def make_data(phase: str, rank: int, seconds: float) -> Data:
    """Makes the data."""
    return Data(seconds if is_late("data", phase, rank) else 0.0)
