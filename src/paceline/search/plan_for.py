"""From a request to its result: the search in all precisions, a verdict on the config as it is written, scaling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.config import Config
from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline.search.from_config import why_not_written, workload_as_written
from paceline.search.request import PlanRequest
from paceline.search.result import PlanResult
from paceline.search.scaling import ScalingRow, scaling_rows
from paceline.search.search import (
    ORDERS,
    Change,
    Order,
    Ranked,
    Search,
    rank_one,
    room_makers,
    search,
    smallest_changes,
)


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
        request=request, found=found, as_written=as_written, not_judged=not_judged, changes=tuple(changes), price=price
    )
    return replace(result, scaling=_tables(request, result, gpus, order)) if gpus else result


def _order(by: str) -> Order:
    for order in ORDERS:
        if by == order:
            return order
    raise UsageError(f"by = {by}\n  plans are ranked by {', '.join(ORDERS)}\n  try by = time")


def _search(request: PlanRequest, order: Order) -> Search:
    """Searches in all precisions that are asked for, as one."""
    found = [
        search(task, request.cluster, order=order, host_memory=request.host_memory, keep=_allows(request.config))
        for task in request.tasks
    ]
    if len(found) == 1:
        return found[0]
    ranked = [each for one in found for each in one.ranked]
    ranked.sort(key=lambda each: each.memory_bytes if order == "memory" else each.seconds)  # stable: as they are asked
    left_out = sum((Counter(one.left_out) for one in found), Counter[str]())
    nearest = min((one.nearest for one in found if one.nearest), key=lambda each: each[1], default=None)
    return replace(
        found[0],
        ranked=tuple(ranked),
        num_fit=sum(one.num_fit for one in found),
        left_out=dict(left_out),
        nearest=None if ranked else nearest,
    )


def _allows(config: Config) -> Callable[[Layout], bool]:
    """Gradients that are compressed are those that replicas of a whole model average (plan/rules.py)."""
    if config.comm.compression.policy == "none":
        return lambda _: True
    return lambda each: not each.is_split and each.strategy in ("ddp", "hybrid")


def _judge(request: PlanRequest, found: Search) -> tuple[Ranked | None, str, list[Change]]:
    """Judges the config as it is written, or says why it is not; and what would make it fit, or anything."""
    task = request.tasks[0]
    if not found.ranked:
        return None, "nothing fits", list(room_makers(found))
    if request.no_config:
        return None, f"no config has this model: {request.no_config}", []
    if task.names_precision:
        return None, "its precision is not the one that is asked for", []
    workload = workload_as_written(request.config, task, request.cluster)
    if workload is None:
        return None, why_not_written(request.config, request.cluster), []
    ranked = rank_one(workload, request.cluster, task.need)
    if found.fits(ranked):
        return ranked, "", []
    return ranked, "", smallest_changes(workload, found, named=_named(request.config))


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
    task = request.tasks[0] if result.winner is None else result.task_for(result.winner)
    return {
        name: tuple(
            scaling_rows(task, request.cluster, gpus, weak=name == "weak", order=order, host_memory=request.host_memory)
        )
        for name in ("strong", "weak")
    }
