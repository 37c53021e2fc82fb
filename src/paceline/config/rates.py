"""How the learning rate grows with the batch: a pure function, the same for plans, explanations and training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config.schema import OptimConfig


def scaled_learning_rate(lr: float, *, rule: str, batch: int, reference: int) -> float:
    """Returns the rate for a global batch, where ``lr`` is meant for ``reference`` samples.

        none      lr
        linear    lr x batch / reference           the step follows the sum of as many small ones (SGD)
        sqrt      lr x sqrt(batch / reference)     keeps the noise of an adaptive optimizer's step (Adam)

    A large batch that is scaled linearly usually needs a warmup.
    """
    ratio = batch / reference
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def peak_learning_rate(optim: OptimConfig, global_batch: int) -> float:
    """Returns the peak rate of a run with this global batch."""
    reference = optim.lr_batch or global_batch
    return scaled_learning_rate(optim.lr, rule=optim.lr_scaling, batch=global_batch, reference=reference)
