"""Dropout whose random numbers belong to places of a sequence: ranks that share one drop what one process does.

Ranks that share a sequence draw from one stream. Each draws the numbers of the whole row (batch, tokens, ...), and
keeps those of its own tokens: for a moment that is a tensor as large as on one rank.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.attention import current_part


def dropout(x: Tensor, probability: float, is_training: bool) -> Tensor:
    """Returns what torch's dropout gives; where ranks share a sequence, for this rank's tokens (batch, tokens, ...)."""
    part = current_part() if is_training and probability else None
    if part is None:
        return F.dropout(x, probability, is_training)
    whole = x.new_ones(x.shape[0], part.length(x.shape[1]), *x.shape[2:])
    return x * part.cut(F.dropout(whole, probability))


class Dropout(nn.Dropout):
    """torch's dropout, for models whose sequences several ranks may share."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)
