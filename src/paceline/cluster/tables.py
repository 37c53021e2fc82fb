"""Seconds between sizes that were measured: a straight line of the logarithms.

Below the smallest they stay as they are: there a message pays for getting going. Beyond the largest they grow with it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


def seconds_between(points: Sequence[tuple[int, float]], size: float) -> float:
    """Returns the seconds of a size; ``points`` are (size, seconds) in growing order."""
    place = bisect_left([each for each, _ in points], size)
    if place == 0:
        return points[0][1]
    if place == len(points):
        largest, seconds = points[-1]
        return seconds * size / largest
    (low, fast), (high, slow) = points[place - 1], points[place]
    share = math.log(size / low) / math.log(high / low)
    return fast * math.pow(slow / fast, share)
