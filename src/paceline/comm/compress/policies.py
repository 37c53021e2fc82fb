"""The policies by name, and which numbers they work with."""

from __future__ import annotations

import difflib

import torch

from paceline.comm.compress.exchange import Policy
from paceline.comm.compress.low_rank import PowerSGD
from paceline.comm.compress.quantised import Cast, Int8, Sign
from paceline.comm.compress.sparse import RandomK, Threshold, TopK
from paceline.errors import UsageError
from paceline.plan.layout import COMPRESSIONS, Compression

POLICIES = tuple(name for name in COMPRESSIONS if name != "none")


def make_policy(settings: Compression) -> Policy:
    """Makes the policy that the settings name. Raises UsageError for numbers that no policy can work with."""
    _check(settings)
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


def _check(given: Compression) -> None:
    if given.policy not in POLICIES:
        near = difflib.get_close_matches(given.policy, POLICIES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "take one of these"
        known = ", ".join(POLICIES)
        raise UsageError(f"compression policy = {given.policy!r} is unknown\n  it is one of {known}\n  {hint}")
    rank = given.factor_rank
    limits = [
        (0 < given.ratio <= 1, f"ratio = {given.ratio:g}", "it is the share of elements sent", "above 0, at most 1"),
        (rank >= 1, f"factor_rank = {rank}", "it is the rank of the factors that are sent", "1 or more"),
        (given.threshold > 0, f"threshold = {given.threshold:g}", "smaller elements are not sent", "above 0"),
        (given.plain_steps >= 0, f"plain_steps = {given.plain_steps}", "it counts steps", "0 or more"),
        (given.min_size >= 0, f"min_size = {given.min_size}", "it counts elements", "0 or more"),
    ]
    problems = [
        f"compression {what}\n  {rule}\n  give a number that is {fix}"
        for is_good, what, rule, fix in limits
        if not is_good
    ]
    if problems:
        raise UsageError("\n".join(problems))
