"""Where a row of layers is cut, so that the slowest stage is as fast as it can be.

A pipeline is as fast as its slowest stage. With c_i the cost of layer i (forward and backward), and best[s][j] the
smallest possible cost of the slowest of s stages that run layers 0 to j - 1,

    best[s][j] = min over i < j of max(best[s - 1][i], c_i + ... + c_(j-1))        stages x layers^2 / 2 steps

and stages whose memory is more than the limit cost infinitely much. Among cuts that are as fast, the one is taken whose
largest stage needs the least memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.errors import UsageError
from paceline.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs: times are seconds or any other unit, the same for all layers of a model.

    ``state_bytes`` is what its parameters need all the time (with gradients and optimizer state), ``activation_bytes``
    what one microbatch keeps for backward.
    """

    name: str
    forward: float
    backward: float
    state_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total(self) -> float:
        return self.forward + self.backward


def choose_bounds(
    costs: Sequence[LayerCost], stages: int, *, memory_bytes: float = math.inf, in_flight: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the cut into ``stages`` whose slowest stage is the fastest, among those that fit into ``memory_bytes``.

    ``in_flight``: how many microbatches each stage keeps at once (1F1B: stages - s); None: one. Raises UsageError where
    there are fewer layers than stages, or no cut fits.
    """
    if stages < 1 or len(costs) < stages:
        raise UsageError(
            f"{stages} stages of a model with {len(costs)} layers\n"
            "  every stage runs at least one whole layer\n"
            f"  take {len(costs)} stages or fewer, or a deeper model"
        )
    in_flight = in_flight or [1] * stages
    times = [0.0, *accumulate(cost.total for cost in costs)]
    states = [0, *accumulate(cost.state_bytes for cost in costs)]
    kept = [0, *accumulate(cost.activation_bytes for cost in costs)]
    no_way = (math.inf, math.inf)
    # best[j]: slowest stage and largest memory of the first s stages over layers 0 to j - 1, and where the last begins.
    best: list[tuple[float, float]] = [(0.0, 0.0), *([no_way] * len(costs))]
    cuts: list[list[int]] = []
    for stage in range(stages):
        begins, found = [0] * len(best), [no_way] * len(best)
        for end in range(stage + 1, len(costs) - (stages - stage - 1) + 1):
            for begin in range(stage, end):
                memory = states[end] - states[begin] + in_flight[stage] * (kept[end] - kept[begin])
                if memory > memory_bytes:
                    continue
                way = (max(best[begin][0], times[end] - times[begin]), max(best[begin][1], memory))
                if way < found[end]:
                    found[end], begins[end] = way, begin
        best, cuts = found, [*cuts, begins]
    if best[-1][0] == math.inf:
        raise UsageError(_too_large(costs, stages, memory_bytes, in_flight))
    bounds = [len(costs)]
    for begins in reversed(cuts):
        bounds.append(begins[bounds[-1]])
    return tuple(reversed(bounds))


def stage_totals(costs: Sequence[LayerCost], bounds: Sequence[int]) -> tuple[float, ...]:
    """Returns the cost of each stage, forward and backward."""
    return tuple(sum(cost.total for cost in costs[begin:end]) for begin, end in pairwise(bounds))


def _too_large(costs: Sequence[LayerCost], stages: int, memory_bytes: float, in_flight: Sequence[int]) -> str:
    needs = {cost.name: cost.state_bytes + min(in_flight) * cost.activation_bytes for cost in costs}
    largest = max(needs, key=lambda name: needs[name])
    states = sum(cost.state_bytes for cost in costs) / stages
    return (
        f"no cut into {stages} stages fits into {memory_bytes / MIB:.0f} MiB a rank\n"
        f"  the largest layer, {largest}, needs {needs[largest] / MIB:.0f} MiB by itself, and parameters with their "
        f"states {states / MIB:.0f} MiB a stage on average\n"
        "  take more stages, a smaller microbatch, activation checkpointing, or a strategy that shards"
    )
