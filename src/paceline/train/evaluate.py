"""Exact evaluation: every sample once, sums and counts added over ranks, divided once at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.data.loader import EvalLoader
from paceline.parallel.ddp import DataParallel
from paceline.train.loss import Loss
from paceline.train.step import place


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the whole evaluation set gave, the same on every rank."""

    loss: float
    accuracy: float | None
    samples: int


@torch.no_grad()
def evaluate(engine: DataParallel, loader: EvalLoader, loss: Loss, dtype: torch.dtype) -> Evaluation:
    """Evaluates the engine over all ranks. One all-reduce of four numbers, and one wait for the device."""
    was_training = engine.module.training
    engine.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=engine.comm.device)  # loss, elements, correct, samples
    has_correct = True
    try:
        for batch, samples in zip(loader, loader.local_samples(), strict=True):
            if batch is None:
                continue
            value = loss.score(engine, place(batch, engine.comm.device, dtype))
            has_correct &= value.correct is not None
            correct = 0.0 if value.correct is None else value.correct
            row = [value.total, value.count, correct, float(samples)]
            sums += torch.stack([torch.as_tensor(v, dtype=torch.float64, device=sums.device) for v in row])
    finally:
        engine.train(was_training)
    engine.comm.all_reduce(sums).wait()
    total, count, correct_sum, num_samples = sums.tolist()  # sync point
    return Evaluation(
        loss=total / max(count, 1.0),
        accuracy=correct_sum / max(count, 1.0) if has_correct else None,
        samples=int(num_samples),
    )
