"""The policies by name."""

from __future__ import annotations

import torch

from paceline.comm.compress.exchange import Policy
from paceline.comm.compress.low_rank import PowerSGD
from paceline.comm.compress.quantised import Cast, Int8, Sign
from paceline.comm.compress.sparse import RandomK, Threshold, TopK
from paceline.errors import UsageError
from paceline.plan.layout import COMPRESSIONS, Compression

POLICIES = tuple(name for name in COMPRESSIONS if name != "none")


def make_policy(settings: Compression) -> Policy:
    """Makes the policy that the settings name. Raises UsageError where they name none."""
    policies: dict[str, Policy] = {
        "topk": TopK(ratio=settings.ratio),
        "randomk": RandomK(ratio=settings.ratio),
        "threshold": Threshold(threshold=settings.threshold),
        "powersgd": PowerSGD(rank=settings.factor_rank),
        "sign": Sign(),
        "int8": Int8(),
        "fp16": Cast(dtype=torch.float16),
        "bf16": Cast(dtype=torch.bfloat16),
    }
    if settings.policy in policies:
        return policies[settings.policy]
    known = ", ".join(POLICIES)
    raise UsageError(
        f"compression policy = {settings.policy!r} is unknown\n  it is one of {known}\n  take one of these"
    )
