"""Some rows of logits on their way through ``head_loss``, and what becomes of them in plain torch.

``head_kernel.py`` does the same in one kernel, where there is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some rows of logits with their targets, and where their losses and right answers go (None: nobody asks).

    Where it ``is_trained``, logits become their gradients.
    """

    logits: Tensor
    targets: Tensor
    losses: Tensor
    hits: Tensor | None
    ignored: int
    smoothing: float
    is_trained: bool


def go_over_by_torch(chunk: Chunk) -> None:
    """Writes the losses and right answers of some rows, and the gradients of their logits over these."""
    logits, targets, smoothing = chunk.logits, chunk.targets, chunk.smoothing
    is_counted = targets != chunk.ignored
    index = torch.where(is_counted, targets, 0)[:, None]
    if chunk.hits is not None:
        chunk.hits.copy_((logits.argmax(-1) == targets) & is_counted)
    wide = logits.to(chunk.losses.dtype)
    normaliser = wide.logsumexp(-1)
    row = normaliser - (1 - smoothing) * wide.gather(1, index)[:, 0]
    if smoothing:
        row -= smoothing * wide.mean(-1)
    chunk.losses.copy_(torch.where(is_counted, row, 0.0))
    if chunk.is_trained:
        wide.sub_(normaliser[:, None]).exp_()
        if smoothing:
            wide.sub_(smoothing / wide.shape[1])
        wide.scatter_add_(1, index, wide.new_full(index.shape, smoothing - 1))
        wide.mul_(is_counted[:, None])
        if wide is not logits:
            logits.copy_(wide)
