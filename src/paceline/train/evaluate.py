"""Exact evaluation: every sample once, sums and counts added over ranks, divided once at the end.

One model is evaluated: where rank 0's buffers are everyone's, the others take them over first, because each rank has
moved its own (batch-norm statistics, say) since the last step began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from paceline.clock import on_device
from paceline.data.loader import EvalLoader
from paceline.engines.engine import Engine
from paceline.train.loss import Loss
from paceline.train.metrics import Metric, score_all
from paceline.train.step import place


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the whole evaluation set gave, the same on every rank."""

    loss: float
    accuracy: float | None
    samples: int
    metrics: dict[str, float] = field(default_factory=dict, hash=False)


@torch.no_grad()
def evaluate(
    engine: Engine, loader: EvalLoader, loss: Loss, dtype: torch.dtype, metrics: Mapping[str, Metric] | None = None
) -> Evaluation:
    """Evaluates the engine over all ranks. One all-reduce of a few numbers, and one wait for the device."""
    engine.share_buffers()
    device = engine.device
    modes = [(module, module.training) for module in engine.module.modules()]
    engine.eval()
    names, score = list(metrics or {}), score_all(loss, metrics or {})
    # Summed loss, elements, right answers, samples, batches without a count of right answers; of metrics sum and count.
    sums = torch.zeros(5 + 2 * len(names), dtype=torch.float64, device=device)
    try:
        for batch, samples in zip(loader, loader.local_samples(), strict=True):
            if batch is None:
                engine.join_pass()
                continue
            with engine.precision.context(device):
                scored = engine.apply_loss(score, place(batch, device, dtype))
            if scored is None:  # another stage of the pipeline has it
                continue
            value, rest = scored
            correct, unscored = (0.0, 1.0) if value.correct is None else (value.correct, 0.0)
            row = [value.total, value.count, correct, float(samples), unscored, *rest]
            sums += torch.stack([on_device(number, device) for number in row])
    finally:
        for module, was_training in modes:  # one by one: a frozen part may have been in evaluation mode all along
            module.training = was_training
    engine.add_up(sums)
    total, count, correct_sum, num_samples, num_unscored, *rest = sums.tolist()  # sync point
    return Evaluation(
        loss=total / max(count, 1.0),
        accuracy=correct_sum / max(count, 1.0) if num_unscored == 0 else None,
        samples=int(num_samples),
        metrics={name: rest[2 * i] / rest[2 * i + 1] if rest[2 * i + 1] else math.nan for i, name in enumerate(names)},
    )
