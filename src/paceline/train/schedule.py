"""Learning rates as a pure function of progress: the same for any number of ranks.

Progress counts optimizer steps or samples, never microbatches or a rank's own share. A step from ``before`` to
``after`` gets, for warm-up w, length n and t = (before - w) / (n - w):

    warm-up     after / w                          while before < w
    constant    1
    linear      final + (1 - final) (1 - t)
    cosine      final + (1 - final) (1 + cos pi t) / 2
    one_cycle   cosine from 1/25 up to 1 over w (30 % of the length if w is 0), then cosine down to final
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "linear", "cosine", "one_cycle"]
_ONE_CYCLE_START = 1 / 25
_ONE_CYCLE_RISE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the learning rate moves over a run of ``length`` units; ``unit`` says what they are."""

    kind: Kind = "constant"
    unit: Literal["steps", "samples"] = "steps"
    warmup: float = 0.0
    length: float
    final_ratio: float = 0.0

    @property
    def is_constant(self) -> bool:
        """Whether the factor is 1 from the first step to the last."""
        return self.kind == "constant" and self.warmup <= 0

    def factor(self, *, before: float, after: float) -> float:
        """Returns the share of the peak rate for the step that takes progress from ``before`` to ``after``."""
        if self.kind == "one_cycle":
            return self._one_cycle(before)
        if before < self.warmup:
            return min(1.0, after / self.warmup)
        t = min(1.0, (before - self.warmup) / max(self.length - self.warmup, 1e-12))
        if self.kind == "linear":
            return self.final_ratio + (1.0 - self.final_ratio) * (1.0 - t)
        if self.kind == "cosine":
            return _cosine(1.0, self.final_ratio, t)
        return 1.0

    def _one_cycle(self, before: float) -> float:
        rise = self.warmup or _ONE_CYCLE_RISE * self.length
        if before < rise:
            return _cosine(_ONE_CYCLE_START, 1.0, before / rise)
        return _cosine(1.0, self.final_ratio, min(1.0, (before - rise) / max(self.length - rise, 1e-12)))


def _cosine(start: float, end: float, t: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * t)) / 2.0
