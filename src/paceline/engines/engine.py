"""What every engine offers: the training step, evaluation and checkpoints know this and no strategy.

What an engine updates may be the module's parameters themselves (data parallelism), or this rank's slices of them
(sharding), under the same names either way. The trainer never needs to know which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from paceline.clock import on_device
from paceline.comm.base import Communicator
from paceline.engines.buckets.choice import BucketChoice
from paceline.engines.precision import Precision
from paceline.errors import UsageError
from paceline.shards import Shard

T = TypeVar("T")


class Engine(Protocol):
    """A module that trains on the ranks of ``comm``, which share out every batch among them."""

    module: nn.Module
    comm: Communicator
    precision: Precision
    bucket_choice: BucketChoice | None  # where the size of buckets was asked to be found, and was

    @property
    def world(self) -> Communicator:
        """All ranks that train together; ``comm`` are those of them that share out the batch."""

    @property
    def random_stream(self) -> int:
        """Which stream of random numbers this rank draws from: ranks that compute the same draw the same."""

    @property
    def reports_samples(self) -> bool:
        """Whether this rank's samples count, or are those of another rank that has another part of the model."""

    @property
    def num_parameters(self) -> int:
        """How many parameters the whole model has."""

    def apply_loss(self, compute: Callable[..., T], batch: Any) -> T | None:
        """Returns ``compute(model, batch)`` without gradients; None where another rank of a pipeline has the result."""

    def add_up(self, sums: torch.Tensor) -> None:
        """Adds what ``apply_loss`` gave over the ranks that share the batch, the same on every rank of the world."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. All ranks call it equally often; one without samples calls ``sit_out``."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterates over what this rank updates."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterates over what this rank updates, under the module's own names, the same on every rank."""

    def train(self, mode: bool = True) -> Engine:
        """Puts the module into training mode."""

    def eval(self) -> Engine:
        """Puts the module into evaluation mode."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulates gradients: those of the backward passes inside are completed by the next one outside."""

    def loss_scale(self, count: float | torch.Tensor) -> torch.Tensor:
        """Returns N / (sum of ``count`` over the N ranks): turns a rank's summed loss into its share of the mean."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients so that their global norm is at most ``max_norm``; returns the norm before.

        The same number on every rank; not finite if any gradient of any rank is not.
        """

    def sit_out(self) -> None:
        """Takes part in a pass of the other ranks for which this rank has no samples.

        That is a forward and its backward, or under ``torch.no_grad()`` a forward alone.
        """

    def interleave(self) -> None:
        """Prepares for passes that alternate: forwards of later microbatches come before the backward of one."""

    def sit_out_forward(self) -> None:
        """Takes part in a forward for which this rank has no samples; ``sit_out_backward`` follows, later."""

    def sit_out_backward(self) -> None:
        """Takes part in the backward of a forward that was sat out."""

    def share_buffers(self) -> None:
        """Gives every rank the buffers of rank 0, where the policy says so."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns all parameters and buffers, whole, on the CPU, under the module's names. All ranks call it."""

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads what ``full_state_dict`` gave."""

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the optimizer's state as one process would have it, whole tensors on the CPU. All ranks call it."""

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads what ``full_optimizer_state`` gave, each rank its part."""

    def shards(self) -> Iterator[Shard]:
        """Yields what this rank holds of the parameters and buffers: the tensors themselves, to save or to fill."""

    def state_names(self) -> Collection[str]:
        """Returns the names of all that ranks together hold."""

    def note_filled(self) -> None:
        """Takes note that the shards have new values."""

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Returns the reduced gradients, whole, under the module's names; None where no rank had one.

        For tests and inspection: it gathers everything. All ranks call it.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError unless the optimizer can update this engine's parameters, and updates no others."""


def loss_scale(comm: Communicator, count: float | torch.Tensor) -> torch.Tensor:
    """Returns N / (sum of ``count`` over the N ranks).

    Gradients are averaged over ranks, so a rank's *summed* loss times this factor gives, after reduction, exactly the
    gradient of the mean over all samples (or tokens) of all ranks and microbatches.
    """
    total = on_device(count, comm.device).clone()
    comm.all_reduce(total).wait()
    return comm.size / total


def check_updates_only(optimizer: torch.optim.Optimizer, parameters: Iterator[nn.Parameter]) -> None:
    """Raises UsageError if the optimizer updates tensors that are not among ``parameters``."""
    ours = {id(parameter) for parameter in parameters}
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in ours for parameter in theirs)
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(theirs)} tensors are not parameters of this engine\n"
            "  an optimizer updates what engine.parameters() gives, or training would change nothing\n"
            f"  build it as {type(optimizer).__name__}(engine.parameters(), ...) after parallelize()"
        )
