"""The largest size that fits, from a few trials: pure, the trials come as a function.

What a model holds grows with its layers along a line. So two small trials tell where the line meets the budget, and the
trials that follow only make sure: memory is lost between blocks of different sizes, which no line shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

PROBES = (1, 3)

Limit = Literal["device", "host", "trials", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one trial needed at most."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much there is, and the most layers to look for."""

    device_bytes: int
    host_bytes: int
    max_layers: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The most layers that fit (0: not even one), the fewest that were seen not to, and what stopped the search.

    ``limit``: the device or the host is full, there were no more trials to find out, or nothing larger was asked for.
    """

    layers: int
    too_many: int | None
    limit: Limit
    tried: tuple[int, ...]


def find_largest(attempt: Callable[[int], Usage | None], budget: Budget, *, max_trials: int = 5) -> Largest:
    """Finds the most layers for which ``attempt`` does not run out of memory (None).

    A size that would not fit on the host is never tried: a host that runs out of memory ends processes.
    """
    fitting: dict[int, Usage] = {}
    tried: list[int] = []
    too_many: int | None = None
    step_back = 1
    while len(tried) < max_trials:
        largest = max(fitting, default=0)
        most = min(_most_on_host(fitting, budget), budget.max_layers if too_many is None else too_many - 1)
        if largest >= most:
            break
        if len(fitting) < len(PROBES) and too_many is None:
            guess = PROBES[len(tried)]
        else:
            guess = _on_the_line(fitting, "device_bytes", budget)
            if too_many is not None and guess >= too_many:
                guess = too_many - step_back  # the line is off by what is lost between blocks: little
                step_back *= 2
        layers = min(max(guess, largest + 1), most)
        tried.append(layers)
        usage = attempt(layers)
        if usage is None:
            too_many = layers
        else:
            fitting[layers] = usage
    largest = max(fitting, default=0)
    limit: Limit = "trials"
    if largest == budget.max_layers:
        limit = "search"
    elif too_many == largest + 1:
        limit = "device"
    elif largest == _most_on_host(fitting, budget):
        limit = "host"
    return Largest(layers=largest, too_many=too_many, limit=limit, tried=tuple(tried))


def _most_on_host(fitting: Mapping[int, Usage], budget: Budget) -> int:
    return max(_on_the_line(fitting, "host_bytes", budget), max(fitting, default=0))


def _on_the_line(fitting: Mapping[int, Usage], what: Literal["device_bytes", "host_bytes"], budget: Budget) -> int:
    """Returns how many layers meet the budget on the line through the two largest that fit."""
    points = sorted(fitting)[-2:]
    if len(points) < 2:
        return budget.max_layers
    low, high = (getattr(fitting[layers], what) for layers in points)
    slope = (high - low) / (points[1] - points[0])
    if slope <= 0:
        return budget.max_layers
    return points[1] + int((getattr(budget, what) - high) // slope)
