"""An exponential moving average of the parameters, for evaluation.

    average = decay * average + (1 - decay) * parameter       after every step

Each rank averages what it updates: its shards, under every strategy, in their dtype (masters, where there are some).
Nothing is sent. Memory: one more copy of the shards, 4 P / N bytes under full sharding; time: one pass over them. A
step that was left out for its gradients counts too: the parameters are then those of the step before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from paceline.checkpoint.manifest import AVERAGE, prefixed
from paceline.checkpoint.read import Checkpoint
from paceline.engines.engine import Engine
from paceline.shards import Shard


class WeightAverage:
    """The average of an engine's parameters, as far as this rank has them. It starts as the parameters are."""

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        held = engine.shards()
        self._held = [
            each for each in held if (each.tensor if each.parameter is None else each.parameter).requires_grad
        ]
        self._parameters = [shard.tensor.detach() for shard in self._held]
        self._averages = [each.clone() for each in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._averages, self._parameters, 1.0 - self._decay)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns what this rank holds of the parameters, each with its average."""
        return list(zip(self._parameters, self._averages, strict=True))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the place of the parameters, and back after it. All ranks do so together."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def shards(self) -> list[Shard]:
        """Returns what this rank holds of the average, to be saved."""
        pairs = zip(self._held, self._averages, strict=True)
        return prefixed(AVERAGE, (replace(shard, tensor=average, parameter=None) for shard, average in pairs))

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint; from the parameters just loaded, if that was saved without an average."""
        if not checkpoint.shapes(AVERAGE):
            for average, parameter in zip(self._averages, self._parameters, strict=True):
                average.copy_(parameter)
            return
        for shard in self.shards():
            checkpoint.fill(shard, shard.name)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            kept = parameter.clone()  # one tensor at a time
            parameter.copy_(average)
            average.copy_(kept)
        self._engine.mark_loaded()
