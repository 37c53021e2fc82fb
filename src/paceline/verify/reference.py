"""The run that it is compared with: plain PyTorch in one process, without an engine.

Exact, in float64: on whole batches. Only a model whose results depend on the number of passes (BatchNorm takes its
statistics over one, and moves them with each) is given microbatches, those of all ranks together.

In mixed precision: the same policy, written out once more. Half precision rounds wherever a batch is cut, so the batch
is cut as the ranks cut it, and what is left to differ is the reduction. Roundings multiply from step to step, so this
run *follows* the ranks: it starts each step from their parameters and updates with their gradients. What it says about
a step is about that step alone, and a mistake shows where it was made. A model of float64 that computes parts in
float32 all the same is followed in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.engines.float8 import swap_linears
from paceline.engines.precision import Precision, kept_parameters
from paceline.errors import UsageError
from paceline.models.registry import model_blocks
from paceline.train.loss import Loss, LossValue
from paceline.train.step import place
from paceline.verify.case import Case, cut, num_samples
from paceline.verify.runs import (
    ActivationRecorder,
    CoarseParts,
    Gradients,
    StepValues,
    casts_cached,
    parameter_names,
    prepare,
    split_state,
)
from paceline.verify.settings import Settings

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one process computed, with batches of ``samples`` cut into ``pieces``; ``coarse`` is below float64."""

    steps: list[StepValues]
    samples: int
    pieces: int
    coarse: CoarseParts


def run_reference(case: Case, settings: Settings, ranks: Sequence[StepValues] | None = None) -> Reference:
    """Trains in one process; where it follows the ranks, ``ranks`` are the values of one of them."""
    with casts_cached(settings.caches_casts):
        run = _OneProcess(case, settings)
        optimizer = case.make_optimizer(run.updated.items())
        batches = [place(case.make_batch(step), _CPU, settings.dtype) for step in range(settings.steps)]
        pieces, coarse = run.num_pieces(batches[0], settings, follows=ranks is not None)
        history: list[StepValues] = []
        for step, batch in enumerate(batches):
            if ranks is not None and step:
                run.start_from(ranks[step - 1])
            start = run.state()[0]
            recorder = ActivationRecorder(run.model) if settings.record_step == step else None
            present = [number for number in range(pieces) if cut(batch, number, pieces) is not None]
            mean = run.accumulate(batch, pieces, step, 1.0 if ranks is None else ranks[step].factor)
            norm = nn.utils.clip_grad_norm_(run.updated.values(), settings.clip or float("inf"))
            _check_finite(step, loss=mean, norm=norm)
            gradients = run.gradients()
            if ranks is not None:
                run.take_gradients(ranks[step].gradients)
            optimizer.step()
            optimizer.zero_grad()
            parameters, buffers = run.state()
            history.append(
                StepValues(
                    loss=mean,
                    norm=norm.detach().clone(),
                    gradients=gradients,
                    parameters=parameters,
                    buffers=buffers,
                    start=start,
                    activations={} if recorder is None else recorder.stop(present),
                )
            )
        return Reference(steps=history, samples=num_samples(batches[0]), pieces=pieces, coarse=coarse)


class _OneProcess:
    """A model in one process: what it computes with, and what the optimizer updates.

    With a policy of masters these are two things: bf16 parameters, and fp32 masters that they are cast from.
    """

    def __init__(self, case: Case, settings: Settings) -> None:
        self.model = prepare(case, settings.dtype)
        self._policy: Precision = settings.policy
        if self._policy.float8 is not None:
            swap_linears(self.model, model_blocks(self.model), by_row=self._policy.float8 == "row")
        self._loss: Loss = case.make_loss()
        self._held = dict(self.model.named_parameters())
        self.updated: dict[str, nn.Parameter] = dict(self._held)
        if self._policy.param_dtype is not None:
            kept = kept_parameters(self.model)
            for name, parameter in self._held.items():
                if parameter not in kept and parameter.is_floating_point():
                    self.updated[name] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                    parameter.data = parameter.data.to(self._policy.param_dtype)

    def num_pieces(self, batch: Any, settings: Settings, *, follows: bool) -> tuple[int, CoarseParts]:
        """Returns into how many pieces batches are cut here, and what of the model is coarser than float64.

        Raises UsageError for a model that draws random numbers: what is random cannot be compared.
        """
        moves, coarse = self._check_repeatable(batch)
        norms = [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        if moves or norms:
            return settings.accumulate, coarse
        return settings.accumulate * settings.data_ranks if follows else 1, coarse

    def start_from(self, values: StepValues) -> None:
        """Takes over parameters and buffers of the ranks, unless these are past following."""
        tensors = {**values.parameters, **values.buffers}
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            return
        with torch.no_grad():
            for name, parameter in self.updated.items():
                parameter.copy_(tensors[name])
            for name, buffer in self.model.named_buffers():
                if name in tensors:
                    buffer.copy_(tensors[name])

    def accumulate(self, batch: Any, pieces: int, step: int, factor: float) -> torch.Tensor:
        """Leaves the gradient of the mean over a batch with the parameters that are updated; returns that mean.

        Summed losses are multiplied by ``factor`` and gradients divided by it: half precision then rounds the numbers
        that it rounds on a rank.
        """
        total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for number in range(pieces):
            piece = cut(batch, number, pieces)
            if piece is None:
                continue
            value = self._forward(piece)
            _check_finite(step, loss=value.total)
            (value.total * factor).backward()  # type: ignore[no-untyped-call]
            self._hand_over()
            total += value.total.detach().double()
            count += torch.as_tensor(value.count, dtype=torch.float64)
        for parameter in self.updated.values():
            if parameter.grad is not None:
                parameter.grad *= 1.0 / (factor * count)
        return total / count

    def gradients(self) -> Gradients:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.updated.items()}

    def take_gradients(self, gradients: Gradients) -> None:
        """Puts other gradients in the place of its own, where there are any."""
        for name, parameter in self.updated.items():
            theirs = gradients.get(name)
            if theirs is not None and parameter.grad is not None and theirs.shape == parameter.shape:
                parameter.grad.copy_(theirs)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns copies of the parameters that are updated, under all their names, and of the buffers."""
        masters = {self._held[name]: parameter for name, parameter in self.updated.items()}
        whole = self.model.state_dict(keep_vars=True)
        return split_state(
            parameter_names(self.model), {name: masters.get(value, value) for name, value in whole.items()}
        )

    def _forward(self, piece: Any) -> LossValue:
        with torch.no_grad():
            for name, parameter in self._held.items():
                if parameter is not self.updated[name]:
                    parameter.data.copy_(self.updated[name])

        def model(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._policy.cast_inputs((args, kwargs))
            return self.model(*args, **kwargs)

        with self._policy.context(_CPU):
            return self._loss(model, piece)

    def _hand_over(self) -> None:
        """Adds the gradients of cast parameters to those of their masters."""
        for name, parameter in self._held.items():
            master = self.updated[name]
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None

    def _check_repeatable(self, batch: Any) -> tuple[bool, CoarseParts]:
        """Makes two passes over a batch, which must give the same.

        Returns whether a pass moves buffers, and what is coarser than float64 in it.
        """
        coarse = CoarseParts(self.model)
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        totals, has_moved = [], False
        with torch.no_grad():
            for watch in (coarse, contextlib.nullcontext()):
                with watch:
                    totals.append(self._forward(batch).total)
                for name, buffer in self.model.named_buffers():
                    has_moved |= not torch.equal(buffer, buffers[name])
                    buffer.copy_(buffers[name])  # running statistics must not move before the first step
        first, second = totals
        if not torch.equal(first, second) and not (first.isnan() and second.isnan()):
            raise UsageError(
                f"two passes over the same batch gave losses {first.item()} and {second.item()}: the model draws "
                "random numbers\n  what is random cannot be compared\n  switch dropout and noise off for the "
                "verification"
            )
        return has_moved, coarse


def _check_finite(step: int, **values: torch.Tensor) -> None:
    for name, value in values.items():
        if not value.isfinite():
            what = "loss" if name == "loss" else "gradient norm"
            raise UsageError(
                f"in one process the {what} of step {step} is {value.item()}\n"
                "  numbers that are not finite cannot be compared\n"
                "  give a batch with samples, a smaller learning rate, or fewer steps"
            )
