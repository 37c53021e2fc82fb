"""The two runs that are compared: a plain loop in one process, and the engine on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.data.loader import StepBatch
from paceline.errors import UsageError
from paceline.parallel.apply import parallelize
from paceline.parity.case import Case, cut, num_samples
from paceline.train.step import StepPolicy, place, train_step

Calls = list[tuple[str, torch.Tensor]]
"""What modules returned, by name, in the order of the calls."""

DTYPE = torch.float64
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a case is run. ``record_step`` asks for the activations of one step."""

    strategy: str = "ddp"
    ranks: int = 4
    steps: int = 3
    accumulate: int = 1
    clip: float | None = 1.0
    record_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """What one step computed; gradients as the optimizer saw them, parameters after its update.

    ``activations`` has the calls of each microbatch that had samples, by its number.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]
    samples: int
    activations: dict[int, Calls] = field(default_factory=dict)


def run_reference(case: Case, settings: Settings) -> list[StepValues]:
    """Trains in one process on whole batches: plain PyTorch, no engine."""
    model = prepare(case)
    loss = case.make_loss()
    optimizer = case.make_optimizer(model.named_parameters())
    history = []
    for step in range(settings.steps):
        batch = place(case.make_batch(step), _CPU, DTYPE)
        if step == 0:
            _check_repeatable(model, loss, batch)
        recorder = Recorder(model) if settings.record_step == step else None
        value = loss(model, batch)
        mean = value.total / value.count
        if not mean.isfinite():
            raise UsageError(
                f"in one process the loss of step {step} is {mean.item()}\n"
                "  numbers that are not finite cannot be compared\n"
                "  give a batch with samples, a smaller learning rate, or fewer steps"
            )
        mean.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))
        gradients = _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        activations = {} if recorder is None else recorder.stop([0])
        history.append(_values(mean, norm, gradients, model, num_samples(batch), activations))
    return history


def run_distributed(comm: Communicator, case: Case, settings: Settings) -> list[StepValues]:
    """Trains this rank's share with the engine and the step that training uses."""
    model = prepare(case)
    # Buckets far smaller than real ones: even a small model is cut into several.
    engine = parallelize(model, comm, settings.strategy, bucket_mb=0.02, first_bucket_mb=0.005)
    loss = case.make_loss()
    optimizer = case.make_optimizer(engine.named_parameters())
    engine.check_optimizer(optimizer)
    gradients: dict[str, torch.Tensor | None] = {}
    optimizer.register_step_pre_hook(lambda *_: gradients.update(_gradients(model)))
    policy = StepPolicy(clip_norm=settings.clip or float("inf"), dtype=DTYPE)
    history = []
    for step in range(settings.steps):
        batch = _share(case.make_batch(step), comm, settings)
        recorder = Recorder(model) if settings.record_step == step else None
        outcome = train_step(engine, optimizer, batch, loss, policy)
        assert outcome.grad_norm is not None
        sums = torch.stack([outcome.loss_sum.double(), torch.as_tensor(outcome.count, dtype=DTYPE)])
        comm.all_reduce(sums).wait()
        mean = sums[0] / sums[1]
        present = [number for number, piece in enumerate(batch.microbatches) if piece is not None]
        activations = {} if recorder is None else recorder.stop(present)
        history.append(_values(mean, outcome.grad_norm, dict(gradients), model, batch.global_samples, activations))
    return history


class Recorder:
    """Keeps what every module without children returns, in the order of the calls, pass by pass."""

    def __init__(self, model: nn.Module) -> None:
        self._passes: list[Calls] = []
        self._handles = [model.register_forward_pre_hook(lambda *_: self._passes.append([]))]
        self._handles += [
            module.register_forward_hook(self._keep(name))
            for name, module in model.named_modules()
            if not any(module.children())
        ]

    def stop(self, microbatches: Sequence[int]) -> dict[int, Calls]:
        """Stops listening and hands over what was kept, by microbatch: each made as many passes as the others."""
        for handle in self._handles:
            handle.remove()
        passes = len(self._passes) // max(len(microbatches), 1)
        return {
            number: [call for each in self._passes[place * passes : (place + 1) * passes] for call in each]
            for place, number in enumerate(microbatches)
        }

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            if isinstance(output, torch.Tensor) and self._passes:
                self._passes[-1].append((name, output.detach().clone()))

        return hook


def prepare(case: Case) -> nn.Module:
    """Builds the model in float64, in training mode, with dropout switched off."""
    model = case.make_model().to(DTYPE).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def _share(batch: Any, comm: Communicator, settings: Settings) -> StepBatch:
    parts = settings.accumulate * comm.size
    pieces = [cut(batch, m * comm.size + comm.rank, parts) for m in range(settings.accumulate)]
    samples = [0 if piece is None else num_samples(piece) for piece in pieces]
    total = num_samples(batch)
    return StepBatch(
        position=0, next_position=total, epoch=0, global_samples=total, microbatches=pieces, local_samples=samples
    )


def _check_repeatable(model: nn.Module, loss: Any, batch: Any) -> None:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    totals = []
    with torch.no_grad():
        for _ in range(2):
            totals.append(loss(model, batch).total)
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])  # running statistics must not move before the first step
    first, second = totals
    if not torch.equal(first, second) and not (first.isnan() and second.isnan()):
        raise UsageError(
            f"two passes over the same batch gave losses {first.item()} and {second.item()}: the model draws random "
            "numbers\n  what is random cannot be compared\n  switch dropout and noise off for the verification"
        )


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def _values(
    mean: torch.Tensor,
    norm: torch.Tensor,
    gradients: dict[str, torch.Tensor | None],
    model: nn.Module,
    samples: int,
    activations: dict[int, Calls],
) -> StepValues:
    return StepValues(
        loss=mean.detach().clone(),
        norm=norm.detach().clone(),
        gradients=gradients,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        samples=samples,
        activations=activations,
    )
