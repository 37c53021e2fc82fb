"""Precision policies: in which dtype parameters are kept, computed with, and reduced.

    name          module computes in      optimizer updates    gradients travel in
    fp32          as built                the parameters       as built
    bf16, fp16    autocast                the parameters       as built
    bf16_master   bf16 parameters         fp32 masters         fp32

Autocast keeps parameters as they were built and casts them operator by operator. With masters the module holds bf16
parameters, which are cast once a step from the fp32 masters that the optimizer updates: fewer casts, and half the bytes
to gather. The loss of an fp16 run is scaled, because small gradients would vanish in that dtype.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Which dtypes a run uses; None means as the model was built."""

    name: str = "fp32"
    autocast_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    scales_loss: bool = False

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Returns what a forward pass runs in."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.autocast_dtype)


PRECISIONS = {
    policy.name: policy
    for policy in (
        Precision(),
        Precision(name="bf16", autocast_dtype=torch.bfloat16),
        Precision(name="fp16", autocast_dtype=torch.float16, scales_loss=True),
        Precision(name="bf16_master", param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
}


def precision_named(precision: str | Precision) -> Precision:
    """Returns the policy of a name; a policy of the user's own is passed through."""
    if isinstance(precision, Precision):
        return precision
    if precision not in PRECISIONS:
        raise UsageError(f"precision = {precision!r} is unknown\n  it is one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]
