"""A plan as it is returned: the ranked ways, why the first is first, its config, its cost, and how it scales.

    cost of a step = seconds x devices x price of a device-hour / 3600

Prices change from week to week and from contract to contract, so that the catalog has none: without one, costs are in
device-hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.search.from_config import planned_values, planned_yaml
from paceline.search.request import PlanRequest, PrecisionWay
from paceline.search.scaling import ScalingRow
from paceline.search.search import (
    Change,
    Ranked,
    Search,
    explain_against,
    explain_winner,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Device-hours and, where a device-hour has a price, dollars: of a step, and of a billion tokens (or samples)."""

    hours_per_step: float
    hours_per_billion: float
    per_step: float | None = None
    per_billion: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFindings:
    """What was found. ``as_written``: what the config itself asks for, and ``changes`` what would make that fit.

    ``not_judged``: why the config itself is not judged, where ``as_written`` is None.
    ``scaling``: the best plan for each number of devices, by ``strong`` and ``weak``; empty where none were named.
    """

    request: PlanRequest
    found: Search
    as_written: Ranked | None = None
    not_judged: str = ""
    changes: tuple[Change, ...] = ()
    scaling: dict[str, tuple[ScalingRow, ...]] = field(default_factory=dict)
    price: float | None = None

    @property
    def plans(self) -> tuple[Ranked, ...]:
        """All that fit, the first the best."""
        return self.found.ranked

    @property
    def winner(self) -> Ranked | None:
        """The best; None where nothing fits."""
        return self.plans[0] if self.plans else None

    @property
    def as_written_fits(self) -> bool:
        return self.as_written is not None and fits(self.as_written, self.found)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed of the model, and of a device that has no units for what it is to compute in."""
        device, kinds = self.request.cluster.device, {each.task.compute for each in self.request.ways}
        missing = sorted(kinds - {*device.peak_flops, "tf32"})  # without tf32 it is fp32, as on every device
        return (
            *self.request.assumed,
            *(
                f"{device.name} has no units for {each}, and emulates it, at {device.peak(each) / 1e12:.4g} TFLOP/s at "
                f"best: its units are for {' and '.join(device.peak_flops)}"
                for each in missing
            ),
        )

    def explanations(self, top: int = 5) -> list[str]:
        """Returns a sentence on the first plan, and one on what each of the next loses against it."""
        if not self.plans:
            return []
        first = self.plans[0]
        return [explain_winner(self.found), *(explain_against(first, each) for each in self.plans[1:top])]

    @property
    def config(self) -> Config:
        """The config that trains the first plan. Raises UsageError where there is none."""
        winner = self._to_train()
        values = planned_values(self.request.config, winner.workload, self.request.cluster)
        return config_from_dict(values, "plan")

    def to_yaml(self) -> str:
        """Returns the config of the first plan as ``paceline train`` takes it. Raises UsageError if there is none."""
        return planned_yaml(self.request.config, self._to_train(), self.request.cluster)

    def cost_of(self, ranked: Ranked) -> PlanCost:
        """Returns what a plan costs."""
        hours = ranked.device_hours
        billions = ranked.tokens_per_s * ranked.seconds / 1e9
        price = self.price
        return PlanCost(
            hours_per_step=hours,
            hours_per_billion=hours / billions,
            per_step=None if price is None else hours * price,
            per_billion=None if price is None else hours * price / billions,
        )

    def cheapest_row(self) -> ScalingRow | None:
        """Returns the number of devices of the table of strong scaling that a token costs least on."""
        rows = [row for row in self.scaling.get("strong", ()) if row.best is not None]
        return min(
            rows, key=lambda row: self.cost_of(row.best).hours_per_billion if row.best else math.inf, default=None
        )

    def way_of(self, ranked: Ranked) -> PrecisionWay:
        """Returns the precision that a plan is of, with its estimate of memory."""
        precision, ways = ranked.layout.precision, self.request.ways
        return next((way for way in ways if way.task.base.precision == precision), ways[0])

    def _to_train(self) -> Ranked:
        if self.request.no_config:
            raise UsageError(f"there is no config: {self.request.no_config}\n  a config's model cannot say that")
        if not self.plans:
            raise UsageError("there is no config: nothing fits\n  a plan's memory is at most 90 % of the device's")
        return self.plans[0]


def fits(ranked: Ranked, found: Search) -> bool:
    """Says whether a way to train fits into the memory that there is."""
    return ranked.memory_bytes <= found.budget and found.host_holds(ranked)
