"""Exact evaluation: every sample once, sums and counts added over ranks, divided once at the end.

One model is evaluated: where rank 0's buffers are everyone's, the others take them over first, because each rank has
moved its own (batch-norm statistics, say) since the last step began.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.clock import on_device
from paceline.data.loader import EvalLoader
from paceline.engines.engine import Engine
from paceline.train.loss import Loss
from paceline.train.step import place


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the whole evaluation set gave, the same on every rank."""

    loss: float
    accuracy: float | None
    samples: int


@torch.no_grad()
def evaluate(engine: Engine, loader: EvalLoader, loss: Loss, dtype: torch.dtype) -> Evaluation:
    """Evaluates the engine over all ranks. One all-reduce of five numbers, and one wait for the device."""
    engine.share_buffers()
    device = engine.comm.device
    modes = [(module, module.training) for module in engine.module.modules()]
    engine.eval()
    # Summed loss, elements, right answers, samples, batches without a count of right answers.
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    try:
        for batch, samples in zip(loader, loader.local_samples(), strict=True):
            if batch is None:
                engine.sit_out()
                continue
            with engine.precision.context(device):
                value = engine.apply_loss(loss.score, place(batch, device, dtype))
            if value is None:  # another stage of the pipeline has it
                continue
            correct, unscored = (0.0, 1.0) if value.correct is None else (value.correct, 0.0)
            row = [value.total, value.count, correct, float(samples), unscored]
            sums += torch.stack([on_device(number, device) for number in row])
    finally:
        for module, was_training in modes:  # one by one: a frozen part may have been in evaluation mode all along
            module.training = was_training
    engine.add_up(sums)
    total, count, correct_sum, num_samples, num_unscored = sums.tolist()  # sync point
    return Evaluation(
        loss=total / max(count, 1.0),
        accuracy=correct_sum / max(count, 1.0) if num_unscored == 0 else None,
        samples=int(num_samples),
    )
