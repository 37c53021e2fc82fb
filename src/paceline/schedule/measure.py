"""How long a schedule takes, how much of that is idle, and how much it holds: a small event simulation.

makespan = work + idle            overhead = idle / work          bubble = idle / makespan
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.schedule.grid import Kind, Schedule, Times, compute_needs, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """How long one microbatch takes in one stage, in any unit. A whole backward takes both parts."""

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, kind: Kind) -> float:
        both = self.backward_input + self.backward_weight
        return {"F": self.forward, "B": both, "I": self.backward_input}.get(kind, self.backward_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCosts:
    """The cost of every stage, and how long a message between two ranks is on its way."""

    stages: tuple[StageCost, ...]
    communication: float = 0.0


def equal_costs(schedule: Schedule) -> ScheduleCosts:
    """Returns equal costs: a rank's share of the model takes 1 forward and 2 backward, its chunks equal parts."""
    part = schedule.ranks / schedule.stages
    stage = StageCost(forward=part, backward_input=part, backward_weight=part)
    return ScheduleCosts(stages=(stage,) * schedule.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMeasure:
    """What a schedule comes to, in the unit of its costs.

    ``in_flight`` is, by rank, the largest number of activations held at once: of one microbatch in one stage each, from
    F to B or W. ``in_flight_share`` counts them in whole shares of the model: with v chunks on a rank, each is a v-th.
    """

    makespan: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    in_flight_share: tuple[float, ...]
    times: Times

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks are idle, over all ranks."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    @property
    def overhead(self) -> float:
        """The idle time relative to the work, over all ranks: how much longer than with ranks that never wait."""
        return len(self.busy) * self.makespan / sum(self.busy) - 1 if self.makespan else 0.0


def measure_schedule(schedule: Schedule, costs: ScheduleCosts | None = None) -> ScheduleMeasure:
    """Runs a valid schedule against a clock; with no costs given, all stages are equal.

    A message is on its way right after what it carries was made. Raises UsageError when the costs do not fit.
    """
    costs = equal_costs(schedule) if costs is None else costs
    if len(costs.stages) != schedule.stages:
        raise UsageError(
            f"there are costs for {len(costs.stages)} stages, and schedule {schedule.name!r} has {schedule.stages}\n"
            "  each stage has a cost of its own, chunks too"
        )
    for stage, cost in enumerate(costs.stages):
        numbers = (cost.forward, cost.backward_input, cost.backward_weight, costs.communication)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not cost.forward:
            raise UsageError(
                f"stage {stage} takes {cost.forward} forward, {cost.backward_input} and {cost.backward_weight} for the "
                f"parts of backward, {costs.communication} for a message\n"
                "  a forward takes some time, and nothing takes less than none, or for ever"
            )
    orders, placement = schedule.compute_orders(), schedule.placement
    times, _ = walk(
        orders,
        compute_needs(orders, schedule.stages),
        lambda action: costs.stages[action.stage].of(action.kind),
        lambda before, after: 0.0 if placement[before.stage] == placement[after.stage] else costs.communication,
    )
    held = {"F": 1, "B": -1, "W": -1}
    peaks = [max(itertools.accumulate(held.get(each.kind, 0) for each in order), default=0) for order in orders]
    chunks = [max(1, placement.count(rank)) for rank in range(schedule.ranks)]
    return ScheduleMeasure(
        makespan=max(end for _, end in times.values()),
        busy=tuple(sum(times[action][1] - times[action][0] for action in order) for order in orders),
        in_flight=tuple(peaks),
        in_flight_share=tuple(peak / count for peak, count in zip(peaks, chunks, strict=True)),
        times=times,
    )
