"""The two runs that are compared, and what one step of them computed.

The run that is verified is the engine on a rank; the reference is plain PyTorch in one process, without an engine.

Exact, in float64: on whole batches. Only a model whose results depend on the number of passes (BatchNorm takes its
statistics over one, and moves them with each) is given microbatches, those of all ranks together.

In mixed precision: the same policy, on a batch that is cut as the ranks cut it, so that what is left to differ is the
reduction. Roundings multiply from step to step, so the reference *follows* the ranks: it starts each step from their
parameters and updates with their gradients. A model of float64 that computes parts in float32 is followed as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import share_memory
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.engines.float8 import swap_linears
from paceline.engines.precision import kept_parameters
from paceline.errors import UsageError
from paceline.models.balance import Balanced, loss_factor
from paceline.models.experts import Experts
from paceline.models.measured import EagerMode
from paceline.models.registry import model_blocks
from paceline.train.loss import LossValue
from paceline.train.step import StepPolicy, make_scaler, place, train_step
from paceline.verify.case import Case, Settings, cut, num_samples

Calls = list[tuple[str, torch.Tensor]]
"""What modules returned, by name, in the order of the calls."""

NamedTensors = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]

LOSS_SCALE = 1024.0  # for fp16: small models have no gradients that vanish, and none of theirs should overflow
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """What one step computed; gradients as the optimizer saw them, parameters and buffers after its update.

    ``factor`` is what summed losses were multiplied by before backward. ``start`` has the parameters before the step,
    where the reference kept them. ``activations`` has the calls of each microbatch that had samples, by its number.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    gradients: Gradients
    parameters: NamedTensors
    buffers: NamedTensors = field(default_factory=dict)
    factor: float = 1.0
    start: NamedTensors = field(default_factory=dict)
    activations: dict[int, Calls] = field(default_factory=dict)


def run_distributed(comm: Communicator, case: Case, settings: Settings) -> list[StepValues]:
    comm = share_memory(comm) if settings.backend == "shared_memory" else comm
    with casts_cached(settings.caches_casts):
        model, names, dropping = prepare(case, settings.dtype)
        restore_dropout(dropping, settings)
        engine = parallelize(model, comm, layout=settings.layout)
        engine.show_batch(lambda: case.make_batch(0))
        loss = case.make_loss()
        optimizer = case.make_optimizer(engine.named_parameters(), engine)
        engine.check_optimizer(optimizer)
        gradients: Gradients = {}
        optimizer.register_step_pre_hook(lambda *_: gradients.update(engine.full_gradients()))
        policy = StepPolicy(clip_norm=settings.clip, dtype=settings.dtype)
        scaler = make_scaler(engine.precision, comm.device, LOSS_SCALE)
        history = []
        for step in range(settings.steps):
            gradients.clear()  # a step that is left out shows none
            seed_step(settings, step)
            batch = share_of(case.make_batch(step), engine.batch_comm, settings.accumulate)
            recorder = ActivationRecorder(engine.module) if settings.record_step == step else None
            outcome = train_step(engine, optimizer, batch, loss, policy, scaler=scaler)
            loss_sum = outcome.loss_sum.double()
            sums = torch.stack([loss_sum, torch.as_tensor(outcome.count, dtype=torch.float64, device=loss_sum.device)])
            engine.gradient_comm.all_reduce(sums).wait()
            present = [number for number, piece in enumerate(batch.microbatches) if piece is not None]
            parameters, buffers = _state(engine, names)
            history.append(
                StepValues(
                    loss=sums[0] / sums[1],
                    norm=outcome.grad_norm.detach().clone(),
                    gradients=dict(gradients),
                    parameters=parameters,
                    buffers=buffers,
                    factor=1.0 if outcome.factor is None else float(outcome.factor),
                    activations={} if recorder is None else recorder.stop(present),
                )
            )
        return history


@contextlib.contextmanager
def casts_cached(is_cached: bool) -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(is_cached)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


Dropping = dict[nn.modules.dropout._DropoutNd, float]
"""Modules that drop elements, and with which probability they do outside of a verification."""


def prepare(case: Case, dtype: torch.dtype) -> tuple[nn.Module, frozenset[str], Dropping]:
    """Builds the model in ``dtype``, in training mode, without dropout; returns also the names of its parameters."""
    model = case.make_model().to(dtype).train()
    dropping = {each: each.p for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd)}
    for module in dropping:
        module.p = 0.0
    return model, frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)), dropping


def restore_dropout(dropping: Dropping, settings: Settings) -> None:
    for module, probability in dropping.items():
        module.p = probability if settings.keeps_dropout else 0.0


def seed_step(settings: Settings, step: int) -> None:
    """Has a step draw the same numbers on the ranks and in one process, where dropout is kept."""
    if settings.keeps_dropout:
        torch.manual_seed(step)


def share_of(batch: Any, comm: Communicator, accumulate: int) -> StepBatch:
    """Returns a rank's microbatches: microbatch m of rank r is piece m * ranks + r of the batch."""
    parts = accumulate * comm.size
    pieces = [cut(batch, m * comm.size + comm.rank, parts) for m in range(accumulate)]
    samples = [0 if piece is None else num_samples(piece) for piece in pieces]
    total = num_samples(batch)
    return StepBatch(
        position=0, next_position=total, epoch=0, global_samples=total, microbatches=pieces, local_samples=samples
    )


def _state(engine: Engine, names: Collection[str]) -> tuple[NamedTensors, NamedTensors]:
    """Returns parameters and buffers, those of rank 0, as an evaluation would have them; this rank keeps its own."""
    own = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
    engine.share_buffers()
    state = split_state(names, engine.full_state_dict())
    for buffer, value in own:
        buffer.copy_(value)
    return state


def split_state(parameters: Collection[str], state: Mapping[str, Any]) -> tuple[NamedTensors, NamedTensors]:
    found: tuple[NamedTensors, NamedTensors] = {}, {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            found[name not in parameters][name] = value.detach().clone()
    return found


class ActivationRecorder:
    """Keeps what modules without children return, pass by pass in the order of the calls; recomputed ones last."""

    def __init__(self, model: nn.Module) -> None:
        self._passes: list[Calls] = []
        self._handles = [model.register_forward_pre_hook(lambda *_: self._passes.append([]))]
        alone = [(name, module) for name, module in model.named_modules() if not any(module.children())]
        leaves = [(name, module) for name, module in alone if not isinstance(module, Experts)]  # rows of all samples
        self._handles += [module.register_forward_hook(partial(self._keep, name)) for name, module in leaves]

    def stop(self, microbatches: Sequence[int]) -> dict[int, Calls]:
        """Stops listening and hands over what was kept, by microbatch: each made as many passes as the others."""
        for handle in self._handles:
            handle.remove()
        passes = len(self._passes) // max(len(microbatches), 1)
        return {
            number: [call for each in self._passes[place * passes : (place + 1) * passes] for call in each]
            for place, number in enumerate(microbatches)
        }

    def _keep(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and self._passes:
            self._passes[-1].append((name, output.detach().clone()))


class CoarseParts(EagerMode):  # type: ignore[no-untyped-call]
    """Finds what computes more coarsely than float64 although the model is of float64, such as a norm in float32.

    ``names`` are the types of the modules that do, in the order in which they come; ``dtype`` is the coarsest, and
    ``unit`` half the distance of two of its numbers, of their size: 0 where nothing is coarse.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}
        self.unit, self.dtype = 0.0, "float64"
        self._inside: list[str] = []
        self._handles: list[Any] = []
        for module in model.modules():
            self._handles += [
                module.register_forward_pre_hook(lambda module, _: self._inside.append(type(module).__name__)),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            ]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dtype != torch.float64:
                self.names[self._inside[-1] if self._inside else "the loss"] = None
                unit = torch.finfo(each.dtype).eps / 2
                if unit > self.unit:
                    self.unit, self.dtype = unit, str(each.dtype).removeprefix("torch.")
        return result

    def _leave(self) -> None:
        self._inside.pop()


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
            seed_step(settings, step)
            mean = run.accumulate(batch, pieces, step, 1.0 if ranks is None else ranks[step].factor)
            norm = nn.utils.clip_grad_norm_(run.updated.values(), settings.clip or float("inf"))
            _check_finite(step, loss=mean, norm=norm)
            gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in run.updated.items()}
            for name, parameter in run.updated.items():  # following the ranks, it updates with theirs
                theirs = None if ranks is None else ranks[step].gradients.get(name)
                if theirs is not None and parameter.grad is not None and theirs.shape == parameter.shape:
                    parameter.grad.copy_(theirs)
            optimizer.step()
            optimizer.zero_grad()
            for each in run.model.modules():
                if isinstance(each, Balanced):
                    each.move_bias(each.arrived)
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
    """A model in one process: bf16 parameters that it computes with, say, and the fp32 masters that are updated."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self.model, self._names, self._dropping = prepare(case, settings.dtype)
        self._policy = settings.policy
        if self._policy.float8 is not None:
            swap_linears(self.model, model_blocks(self.model), by_row=self._policy.float8 == "row")
        self._loss = case.make_loss()
        self._held = dict(self.model.named_parameters())
        self.updated: dict[str, nn.Parameter] = dict(self._held)
        if self._policy.param_dtype is not None:
            kept = kept_parameters(self.model)
            for name, parameter in self._held.items():
                if parameter not in kept and parameter.is_floating_point():
                    self.updated[name] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                    parameter.data = parameter.data.to(self._policy.param_dtype)

    def num_pieces(self, batch: Any, settings: Settings, *, follows: bool) -> tuple[int, CoarseParts]:
        """Returns how batches are cut, and what is coarse. Raises UsageError where two passes differ: randomness."""
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
            what = f"two passes over the same batch gave losses {first.item()} and {second.item()}"
            rule, fix = "what is random cannot be compared", "switch dropout and noise off for the verification"
            raise UsageError(f"{what}: the model draws random numbers\n  {rule}\n  {fix}")
        restore_dropout(self._dropping, settings)
        if has_moved or any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in self.model.modules()):
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

        Summed losses are multiplied by ``factor``, gradients divided by it: then halves are rounded as on a rank.
        """
        total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for number in range(pieces):
            piece = cut(batch, number, pieces)
            if piece is None:
                continue
            with loss_factor(self.model, factor):
                value = self._forward(piece)
                _check_finite(step, loss=value.total)
                (value.total * factor).backward()  # type: ignore[no-untyped-call]
            for name, parameter in self._held.items():  # gradients of cast parameters go to their masters
                master = self.updated[name]
                if master is not parameter and parameter.grad is not None:
                    gradient = parameter.grad.to(master.dtype)
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    parameter.grad = None
            total += value.total.detach().double()
            count += torch.as_tensor(value.count, dtype=torch.float64)
        for parameter in self.updated.values():
            if parameter.grad is not None:
                parameter.grad *= 1.0 / (factor * count)
        return total / count

    def state(self) -> tuple[NamedTensors, NamedTensors]:
        """Returns copies of the parameters that are updated, under all their names, and of the buffers."""
        masters = {self._held[name]: parameter for name, parameter in self.updated.items()}
        whole = self.model.state_dict(keep_vars=True)
        return split_state(self._names, {name: masters.get(value, value) for name, value in whole.items()})

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


def _check_finite(step: int, **values: torch.Tensor) -> None:
    for name, value in values.items():
        if not value.isfinite():
            what = "loss" if name == "loss" else "gradient norm"
            text = f"in one process the {what} of step {step} is {value.item()}"
            rule = "numbers that are not finite cannot be compared"
            raise UsageError(f"{text}\n  {rule}\n  give a batch with samples, a smaller learning rate, or fewer steps")
