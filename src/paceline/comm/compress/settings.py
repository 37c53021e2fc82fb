"""What may be chosen about compression, and the policy that follows from it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from paceline.comm.compress.exchange import Policy
from paceline.comm.compress.low_rank import PowerSGD
from paceline.comm.compress.quantised import Cast, Int8, Sign
from paceline.comm.compress.sparse import RandomK, Threshold, TopK
from paceline.errors import UsageError

POLICIES = ("topk", "randomk", "threshold", "powersgd", "sign", "int8", "fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """A policy with its numbers, and what it is not applied to.

    Biases and the weights of norms (all tensors of one dim) always travel whole, and so do tensors with fewer than
    ``min_size`` elements and those whose name matches a pattern of ``exclude``. The first ``warmup_steps`` steps
    compress nothing. ``error_feedback`` adds what a step did not send to the next one.
    """

    policy: str
    ratio: float = 0.01
    rank: int = 4
    threshold: float = 1e-3
    error_feedback: bool = True
    warmup_steps: int = 0
    min_size: int = 1024
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for numbers that no policy can work with."""
        if self.policy not in POLICIES:
            near = difflib.get_close_matches(self.policy, POLICIES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "take one of these"
            known = ", ".join(POLICIES)
            raise UsageError(f"compression policy = {self.policy!r} is unknown\n  it is one of {known}\n  {hint}")
        limits = [
            (0 < self.ratio <= 1, f"ratio = {self.ratio:g}", "it is the share of elements sent", "above 0, at most 1"),
            (self.rank >= 1, f"rank = {self.rank}", "it is the rank of the factors that are sent", "1 or more"),
            (self.threshold > 0, f"threshold = {self.threshold:g}", "smaller elements are not sent", "above 0"),
            (self.warmup_steps >= 0, f"warmup_steps = {self.warmup_steps}", "it counts steps", "0 or more"),
            (self.min_size >= 0, f"min_size = {self.min_size}", "it counts elements", "0 or more"),
        ]
        problems = [
            f"compression {what}\n  {rule}\n  give a number that is {fix}"
            for is_good, what, rule, fix in limits
            if not is_good
        ]
        if problems:
            raise UsageError("\n".join(problems))

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Says whether a tensor is compressed, as far as the settings say."""
        if len(shape) < 2 or torch.Size(shape).numel() < max(self.min_size, 1):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)


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
            return PowerSGD(rank=settings.rank)
        case "sign":
            return Sign()
        case "int8":
            return Int8()
        case "fp16":
            return Cast(dtype=torch.float16)
        case _:
            return Cast(dtype=torch.bfloat16)
