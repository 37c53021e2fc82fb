"""A plan as it is returned: the ranked ways, why the first is first, its config, its cost, and how it scales.

    cost of a step = seconds x devices x price of a device-hour / 3600

Prices change from week to week and from contract to contract, so that the catalog has none: without one, costs are in
device-hours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline.search.from_config import planned_values, planned_yaml, why_not_written, workload_as_written
from paceline.search.request import PlanRequest, PrecisionWay
from paceline.search.scaling import ScalingRow, scaling_rows
from paceline.search.search import (
    ORDERS,
    Change,
    Order,
    Ranked,
    Search,
    explain_against,
    explain_winner,
    rank_one,
    room_makers,
    search,
    smallest_changes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Device-hours and, where a device-hour has a price, dollars: of a step, and of a billion tokens (or samples)."""

    hours_per_step: float
    hours_per_billion: float
    per_step: float | None = None
    per_billion: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
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
        return self.as_written is not None and _fits(self.as_written, self.found)

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

    def to_json(self, top: int = 5) -> dict[str, Any]:
        """Returns all of it as plain data, of the plans the first few."""
        from paceline.search.result_json import result_json

        return result_json(self, top)

    def to_text(self, top: int = 5) -> str:
        """Returns what a person wants to know."""
        from paceline.search.result_text import result_text

        return result_text(self, top)

    def _to_train(self) -> Ranked:
        if self.request.no_config:
            raise UsageError(f"there is no config: {self.request.no_config}\n  a config's model cannot say that")
        if not self.plans:
            raise UsageError("there is no config: nothing fits\n  a plan's memory is at most 90 % of the device's")
        return self.plans[0]


def plan_for(
    request: PlanRequest, *, by: str = "time", gpus: Sequence[int] | None = None, price: float | None = None
) -> PlanResult:
    """Searches, and judges the config as it is written. ``gpus``: numbers of devices for tables of scaling.

    Raises UsageError for an order, a price or a number of devices that cannot be.
    """
    order = _order(by)
    if price is not None and not (isinstance(price, int | float) and math.isfinite(price) and price > 0):
        raise UsageError(
            f"price {price} of a device-hour\n  it is in dollars, and above 0\n  leave it out for device-hours"
        )
    found = _search(request, order)
    as_written, not_judged, changes = _judge(request, found)
    result = PlanResult(
        request=request,
        found=found,
        as_written=as_written,
        not_judged=not_judged,
        changes=tuple(changes),
        price=price,
    )
    return replace(result, scaling=_tables(request, result, gpus, order)) if gpus else result


def _order(by: str) -> Order:
    for order in ORDERS:
        if by == order:
            return order
    raise UsageError(f"--by {by}\n  plans are ranked by {', '.join(ORDERS)}\n  try --by time")


def _search(request: PlanRequest, order: Order) -> Search:
    """Searches in all precisions that are asked for, as one."""
    found = [
        search(
            way.task,
            request.cluster,
            order=order,
            need=way.need,
            host_memory=request.host_memory,
            keep=_allows(request.config),
        )
        for way in request.ways
    ]
    if len(found) == 1:
        return found[0]
    ranked = [each for one in found for each in one.ranked]
    ranked.sort(key=lambda each: each.memory_bytes if order == "memory" else each.seconds)  # stable: as they are asked
    left_out: Counter[str] = Counter()
    for one in found:
        left_out.update(one.left_out)
    nearest = min((one.nearest for one in found if one.nearest), key=lambda each: each[1], default=None)
    return Search(
        task=found[0].task,
        cluster=request.cluster,
        order=order,
        ranked=tuple(ranked),
        num_fit=sum(one.num_fit for one in found),
        left_out=dict(left_out),
        nearest=None if ranked else nearest,
        host_memory=request.host_memory,
    )


def _allows(config: Config) -> Callable[[Layout], bool]:
    """Gradients that are compressed are those that replicas of a whole model average (plan/rules.py)."""
    if config.comm.compression.policy == "none":
        return lambda _: True
    return lambda each: not each.is_split and each.strategy in ("ddp", "hybrid")


def _judge(request: PlanRequest, found: Search) -> tuple[Ranked | None, str, list[Change]]:
    """Judges the config as it is written, or says why it is not; and what would make it fit, or anything."""
    task, way = request.task, request.ways[0]
    if not found.ranked:
        changes = room_makers(found, lambda each: way.need if each.seq_len == task.seq_len else None)
        return None, "nothing fits", changes
    if request.no_config:
        return None, f"no config has this model: {request.no_config}", []
    if task.names_precision:
        return None, "its precision is not the one that is asked for", []
    workload = workload_as_written(request.config, task, request.cluster)
    if workload is None:
        return None, why_not_written(request.config, request.cluster), []
    ranked = rank_one(workload, request.cluster, way.need)
    if _fits(ranked, found):
        return ranked, "", []
    return ranked, "", smallest_changes(workload, found, named=_named(request.config))


def _fits(ranked: Ranked, found: Search) -> bool:
    return ranked.memory_bytes <= found.budget and found.host_holds(ranked)


def _named(config: Config) -> tuple[str, ...]:
    """Keys that a change of the mesh must name: a microbatch that follows from it, and what else the config fixes."""
    train = config.train
    return (
        *(() if train.microbatch else ("train.microbatch",)),
        *(("train.accumulate",) if train.accumulate else ()),
        *(("parallel.data",) if config.parallel.data else ()),
    )


def _tables(
    request: PlanRequest, result: PlanResult, gpus: Sequence[int], order: Order
) -> dict[str, tuple[ScalingRow, ...]]:
    winner = result.winner
    way = request.ways[0] if winner is None else result.way_of(winner)
    return {
        name: tuple(
            scaling_rows(
                way.task,
                request.cluster,
                gpus,
                weak=name == "weak",
                need=way.need,
                order=order,
                host_memory=request.host_memory,
            )
        )
        for name in ("strong", "weak")
    }
