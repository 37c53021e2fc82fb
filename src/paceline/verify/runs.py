"""The run that is verified: the engine on a rank, with the step that training uses; and what one step computed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.comm.base import Communicator
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.train.step import StepPolicy, make_scaler, train_step
from paceline.verify.case import Case, cut, num_samples
from paceline.verify.settings import Settings

Calls = list[tuple[str, torch.Tensor]]
"""What modules returned, by name, in the order of the calls."""

Gradients = dict[str, torch.Tensor | None]

LOSS_SCALE = 1024.0  # for fp16: small models have no gradients that vanish, and none of theirs should overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """What one step computed; gradients as the optimizer saw them, parameters and buffers after its update.

    ``factor`` is what summed losses were multiplied by before backward. ``start`` has the parameters before the step,
    where the reference kept them. ``activations`` has the calls of each microbatch that had samples, by its number.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    gradients: Gradients
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    factor: float = 1.0
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    activations: dict[int, Calls] = field(default_factory=dict)


def run_distributed(comm: Communicator, case: Case, settings: Settings) -> list[StepValues]:
    """Trains this rank's share with the engine and the step that training uses."""
    with casts_cached(settings.caches_casts):
        model = prepare(case, settings.dtype)
        names = parameter_names(model)
        engine = parallelize(model, comm, layout=settings.layout)
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
    """Lets autocast keep what it has cast, or not, on this thread."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(is_cached)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def prepare(case: Case, dtype: torch.dtype) -> nn.Module:
    """Builds the model in ``dtype``, in training mode, with dropout switched off."""
    model = case.make_model().to(dtype).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def share_of(batch: Any, comm: Communicator, accumulate: int) -> StepBatch:
    """Returns a rank's microbatches: microbatch m of rank r is piece m * ranks + r of the batch."""
    parts = accumulate * comm.size
    pieces = [cut(batch, m * comm.size + comm.rank, parts) for m in range(accumulate)]
    samples = [0 if piece is None else num_samples(piece) for piece in pieces]
    total = num_samples(batch)
    return StepBatch(
        position=0, next_position=total, epoch=0, global_samples=total, microbatches=pieces, local_samples=samples
    )


def _state(engine: Engine, names: Collection[str]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns parameters and buffers as an evaluation would have them: the buffers are those of rank 0.

    This rank then gets its own back: whether the next step shares them is part of what is verified.
    """
    own = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
    engine.share_buffers()
    state = split_state(names, engine.full_state_dict())
    for buffer, value in own:
        buffer.copy_(value)
    return state


def parameter_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of a model's parameters, a tied one under each of its names."""
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))


def split_state(
    parameters: Collection[str], state: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the parameters of a state dict, by their names, and its buffers."""
    tensors = {name: value.detach().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    return (
        {name: value for name, value in tensors.items() if name in parameters},
        {name: value for name, value in tensors.items() if name not in parameters},
    )


class ActivationRecorder:
    """Keeps what every module without children returns, in the order of the calls, pass by pass.

    A checkpointed part runs again in backward; those calls come behind all others of their pass.
    """

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


class CoarseParts(TorchDispatchMode):  # type: ignore[no-untyped-call]
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Says that what is run is not compiled: torch need not ask its compiler at each operator."""
        return False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
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
