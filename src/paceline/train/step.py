"""One optimizer step over this rank's microbatches: the one that training, simulation and verification all run.

    scale = ranks / count                      count over all ranks and microbatches, known before backward
    for each microbatch:                       all but the last without synchronisation
        (summed loss * scale).backward()       gradients are averaged over ranks: the ranks cancel
    clip by the global norm; update

So the gradient is that of the mean over the global batch, however it was cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from paceline.data.loader import StepBatch
from paceline.parallel.ddp import DataParallel
from paceline.train.loss import Loss, LossValue


class Laps(Protocol):
    """Takes the time of the phases of a step."""

    def lap(self, phase: str) -> None:
        """Ends a phase: what has passed since the last lap belongs to it."""


class NoLaps:
    """Takes no time."""

    def lap(self, phase: str) -> None:
        """Does nothing."""


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What a step computed on this rank; tensors stay on the device until somebody asks."""

    loss_sum: torch.Tensor
    count: torch.Tensor | float
    grad_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """What may be chosen about a step."""

    clip_norm: float | None = None
    dtype: torch.dtype = torch.float32


def train_step(
    engine: DataParallel,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    loss: Loss,
    policy: StepPolicy,
    laps: Laps | None = None,
) -> StepOutcome:
    """Trains on one global batch and updates the parameters."""
    laps = laps or NoLaps()
    ranks = engine.comm.size
    per_sample = loss.elements_per_sample
    # Where every sample counts alike the global count needs no communication: all ranks know the global batch.
    scale = None if per_sample is None else ranks / (batch.global_samples * per_sample)
    values = accumulate(engine, batch.microbatches, loss, scale, policy.dtype, laps)
    loss_sum = _total([value.total.detach() for value in values], engine.comm.device)
    count = sum((value.count for value in values), 0.0)
    if scale is None:
        weigh_gradients(engine, count)
        laps.lap("backward")
    norm = engine.clip_grad_norm_(policy.clip_norm) if policy.clip_norm is not None else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    laps.lap("optimizer")
    return StepOutcome(loss_sum=loss_sum, count=count, grad_norm=norm)


def accumulate(
    engine: DataParallel,
    microbatches: Sequence[Any],
    loss: Loss,
    scale: float | None,
    dtype: torch.dtype,
    laps: Laps,
) -> list[LossValue]:
    """Runs forward and backward over the microbatches; gradients are reduced with the last one."""
    present = [microbatch for microbatch in microbatches if microbatch is not None]
    values = []
    for number, microbatch in enumerate(present):
        is_last = number == len(present) - 1
        with contextlib.nullcontext() if is_last else engine.no_sync():
            value = loss(engine, place(microbatch, engine.comm.device, dtype))
            laps.lap("forward")
            (value.total if scale is None else value.total * scale).backward()  # type: ignore[no-untyped-call]
            laps.lap("backward")
        values.append(value)
    if not present:
        engine.reduce_gradients()  # this rank got no samples, but the others wait for it
        laps.lap("backward")
    return values


@torch.no_grad()
def weigh_gradients(engine: DataParallel, count: float | torch.Tensor) -> None:
    """Turns gradients of summed losses, averaged over ranks, into those of the global mean.

    Where nothing counts on any rank (every target is ignored) the sums are zero, and so is the gradient.
    """
    scale = engine.loss_scale(count)
    scale = torch.where(scale.isfinite(), scale, torch.zeros_like(scale))
    gradients = [p.grad for p in engine.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))


def place(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Brings a batch to the device, and its floating point tensors to ``dtype``."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        target = dtype if value.is_floating_point() else value.dtype
        return value.to(device=device, dtype=target, non_blocking=True)

    return tree_map(move, batch)


def _total(values: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack(values).sum() if values else torch.zeros((), device=device)
