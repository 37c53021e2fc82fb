"""The largest size that fits, from a few trials: pure, the trials come as a function.

What a model holds grows with its layers along a line. So two small trials tell where the line meets the budget, and the
trials that follow only make sure: memory is lost between blocks of different sizes, which no line shows.
"""

from __future__ import annotations

from collections.abc import Callable
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
    search = _LayerSearch(budget)
    while len(search.tried) < max_trials:
        layers = search.next_layers()
        if layers is None:
            break
        search.note(layers, attempt(layers))
    return search.result()


class _LayerSearch:
    """How far the trials have come."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.tried: list[int] = []
        self._fitting: dict[int, Usage] = {}
        self._too_many: int | None = None
        self._step_back = 1

    @property
    def _largest(self) -> int:
        return max(self._fitting, default=0)

    def note(self, layers: int, usage: Usage | None) -> None:
        self.tried.append(layers)
        if usage is not None:
            self._fitting[layers] = usage
        elif self._too_many is None or layers < self._too_many:
            self._too_many = layers

    def next_layers(self) -> int | None:
        """Returns what to try next, or None where the answer is known."""
        largest, ceiling = self._largest, self._ceiling()
        if largest >= ceiling:
            return None
        if len(self._fitting) < len(PROBES) and self._too_many is None:
            return min(PROBES[len(self.tried)], ceiling)
        guess = self._on_the_line("device_bytes", self.budget.device_bytes)
        if self._too_many is not None and guess >= self._too_many:
            guess = self._too_many - self._step_back  # the line is off by what is lost between blocks: little
            self._step_back *= 2
        return min(max(guess, largest + 1), ceiling)

    def result(self) -> Largest:
        limit: Limit = "trials"
        if self._largest == self.budget.max_layers:
            limit = "search"
        elif self._too_many == self._largest + 1:
            limit = "device"
        elif self._largest == self._host_ceiling():
            limit = "host"
        return Largest(layers=self._largest, too_many=self._too_many, limit=limit, tried=tuple(self.tried))

    def _ceiling(self) -> int:
        known = self.budget.max_layers if self._too_many is None else self._too_many - 1
        return min(known, self._host_ceiling(), self.budget.max_layers)

    def _host_ceiling(self) -> int:
        return max(self._on_the_line("host_bytes", self.budget.host_bytes), self._largest)

    def _on_the_line(self, what: Literal["device_bytes", "host_bytes"], available: int) -> int:
        """Returns how many layers meet ``available`` on the line through the two largest that fit."""
        points = sorted(self._fitting)[-2:]
        if len(points) < 2:
            return self.budget.max_layers
        low, high = (getattr(self._fitting[layers], what) for layers in points)
        slope = (high - low) / (points[1] - points[0])
        if slope <= 0:
            return self.budget.max_layers
        return points[1] + int((available - high) // slope)
