"""How much more the busiest of some ranks has to do than the mean.

Experts are not chosen evenly. "Auxiliary-Loss-Free Load Balancing" (Wang and others, arXiv 2408.15664, table 2) has the
load of the busiest of 64 experts over the mean, less 1: 0.72 by an auxiliary loss and 0.04 by a bias (1B parameters; of
3B 0.52 and 0.04). Of 64 normal deviates the largest is E64 = 2.4 on average, so an expert's load deviates by v / E64 of
the mean. A rank with m experts deviates by 1 / sqrt(m) of that, and all wait for the largest of N ranks:

    busiest = 1 + v / E64 / sqrt(m) x E_N        at most N: one rank has all, and at most the capacity of an expert
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

from paceline.plan.model_shape import ModelShape

_VIOLATION = {"aux": 0.72, "bias": 0.04, "none": 0.72}  # without balance no figure is known: it may be any
_PUBLISHED_EXPERTS = 64


@cache
def expected_most(count: int) -> float:
    """Returns the expected largest of so many normal deviates, by Blom's formula: 1.4 of 8, 3.2 of 1,024."""
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def busiest_share(model: ModelShape, ranks: int) -> float:
    """Returns the rows of the busiest of ``ranks`` that share the experts, over the mean."""
    if ranks == 1 or not model.experts:
        return 1.0
    deviation = _VIOLATION[model.router.balance] / expected_most(_PUBLISHED_EXPERTS)
    found = 1 + deviation / math.sqrt(max(1.0, model.experts / ranks)) * expected_most(ranks)
    return min(found, float(ranks), model.router.capacity or math.inf)
