"""From the settings of a compression to its policy."""

from __future__ import annotations

import torch

from paceline.comm.compress.exchange import Policy
from paceline.comm.compress.low_rank import PowerSGD
from paceline.comm.compress.quantised import Cast, Int8, Sign
from paceline.comm.compress.sparse import RandomK, Threshold, TopK
from paceline.plan.layout import Compression


def make_policy(settings: Compression) -> Policy:
    """Makes the policy that the settings name."""
    match settings.policy:
        case "topk":
            return TopK(ratio=settings.ratio)
        case "randomk":
            return RandomK(ratio=settings.ratio)
        case "threshold":
            return Threshold(threshold=settings.threshold)
        case "powersgd":
            return PowerSGD(rank=settings.factor_rank)
        case "sign":
            return Sign()
        case "int8":
            return Int8()
        case "fp16":
            return Cast(dtype=torch.float16)
        case _:
            return Cast(dtype=torch.bfloat16)
