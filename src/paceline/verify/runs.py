"""The run that is verified: the engine on a rank, with the step that training uses."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.train.step import StepPolicy, make_scaler, train_step
from paceline.verify.case import Case, cut, num_samples
from paceline.verify.settings import Settings
from paceline.verify.values import ActivationRecorder, Gradients, StepValues, parameter_names, split_state

LOSS_SCALE = 1024.0  # for fp16: small models have no gradients that vanish, and none of theirs should overflow


def run_distributed(comm: Communicator, case: Case, settings: Settings) -> list[StepValues]:
    """Trains this rank's share with the engine and the step that training uses."""
    with casts_cached(settings.caches_casts):
        return _train(comm, case, settings)


@contextlib.contextmanager
def casts_cached(is_cached: bool) -> Iterator[None]:
    """Lets autocast keep what it has cast, or not, on this thread."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(is_cached)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _train(comm: Communicator, case: Case, settings: Settings) -> list[StepValues]:
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
