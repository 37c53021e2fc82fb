"""What all engines do alike for their users, whatever they do with parameters and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.parallel.bucket_choice import BucketChoice
from paceline.parallel.buffers import SharedBuffers
from paceline.parallel.engine import loss_scale


class EngineFace:
    """Modes, accumulation, the weight of a loss, and buffers. An engine sets these attributes when it is built."""

    module: nn.Module
    comm: Communicator
    bucket_choice: BucketChoice | None = None
    _buffers: SharedBuffers
    _is_syncing: bool

    def train(self, mode: bool = True) -> Self:
        """Puts the module into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Puts the module into evaluation mode."""
        return self.train(False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients: those of the backward passes inside are completed by the next one outside."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def loss_scale(self, count: float | torch.Tensor) -> torch.Tensor:
        """Returns N / (sum of ``count`` over the N ranks): turns a rank's summed loss into its share of the mean.

        Called by every rank once a step, with its count over all microbatches of the step.
        """
        return loss_scale(self.comm, count)

    def share_buffers(self) -> None:
        """Gives every rank the buffers of rank 0, where the policy says so."""
        self._buffers.share()
