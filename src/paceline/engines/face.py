"""What all engines do alike for their users, whatever they do with parameters and gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.buckets.choice import BucketChoice
from paceline.engines.buffers import SharedBuffers
from paceline.engines.engine import loss_scale
from paceline.engines.flat.flat import FlatGroup, full_shape
from paceline.engines.flat.shards import buffer_shards, parameter_shards
from paceline.shards import Shard

T = TypeVar("T")


class EngineFace:
    """Modes, accumulation, the weight of a loss, and buffers. An engine sets these attributes when it is built."""

    module: nn.Module
    comm: Communicator
    bucket_choice: BucketChoice | None = None
    flat_groups: Sequence[FlatGroup] = ()  # whose pieces the optimizer updates, where it is not the parameters
    holds_first_copy: bool  # of its part of the gradients: no rank before this one has the same part
    piece_copies: tuple[int, int] = (0, 1)  # which of how many ranks this is that hold the same pieces
    _buffers: SharedBuffers
    _is_syncing: bool

    def train(self, mode: bool = True) -> Self:
        """Puts the module into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Puts the module into evaluation mode."""
        return self.train(False)

    @property
    def random_stream(self) -> int:
        """Which stream of random numbers this rank draws from: one of its own."""
        return self.comm.rank

    @property
    def reports_samples(self) -> bool:
        """Whether this rank's samples count: no other rank has the same ones."""
        return True

    @property
    def num_parameters(self) -> int:
        """How many parameters the whole model has; those of a sharded module are this rank's pieces."""
        return sum(math.prod(full_shape(parameter)) for parameter in self.parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterates over what this rank updates."""
        raise NotImplementedError

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterates over what this rank updates, under the module's own names."""
        raise NotImplementedError

    def shards(self) -> Iterator[Shard]:
        """Yields what this rank holds of the parameters and buffers: the tensors themselves, to save or to fill."""
        named = list(self.named_parameters())
        whole = (self.comm.rank, self.comm.size)
        yield from parameter_shards(named, self.flat_groups, whole=whole, pieces=self.piece_copies)
        yield from buffer_shards(self.module, (name for name, _ in named), is_writer=self.comm.rank == 0)

    def state_names(self) -> Collection[str]:
        """Returns the names of all that ranks together hold: every rank has a shard of each, if an empty one."""
        return {shard.name for shard in self.shards()}

    def note_filled(self) -> None:
        """Takes note that the shards have new values, which no version counter tells."""
        for group in self.flat_groups:
            group.note_change()

    @property
    def world(self) -> Communicator:
        """All ranks that train together: without model parallelism, those that share the batch."""
        return self.comm

    def apply_loss(self, compute: Callable[..., T], batch: Any) -> T | None:
        """Returns ``compute(model, batch)``."""
        return compute(self, batch)

    def add_up(self, sums: torch.Tensor) -> None:
        """Adds numbers over the ranks that share the batch."""
        self.comm.all_reduce(sums).wait()

    def interleave(self) -> None:
        """Prepares for passes that alternate: nothing to do where parameters stay whole."""

    def sit_out_forward(self) -> None:
        """Takes part in the forward of the others: they need nothing of this rank that backward does not give."""

    def sit_out_backward(self) -> None:
        """Takes part in the backward that belongs to a forward that was sat out."""
        self.sit_out()

    def sit_out(self) -> None:
        """Takes part in a pass of the other ranks for which this rank has no samples."""
        raise NotImplementedError

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
