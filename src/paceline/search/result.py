"""``plan_for``: the best layouts for a model on a cluster, in every form: objects, a config, text, JSON.

    cost of a step = seconds x devices x price of a device-hour / 3600

Prices change from week to week and from contract to contract, so that the catalog has none: without one, costs are in
device-hours.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.config import Config, config_from_dict
from paceline.config.yaml_text import dump_values
from paceline.errors import UsageError
from paceline.notebook import Shown, table
from paceline.plan.layout import Layout
from paceline.plan.workload import Workload
from paceline.predict.formulas.step import Prediction
from paceline.search.candidates import TrainingTask
from paceline.search.request import PlanRequest, planned_values, why_not_written, workload_as_written
from paceline.search.scaling import ScalingRow, scaling_rows
from paceline.search.search import (
    ORDERS,
    Change,
    Order,
    Search,
    explain_against,
    explain_winner,
    host_bytes,
    node_bytes,
    rank_one,
    search,
    smallest_changes,
    what_would_fit,
)
from paceline.search.snapshots import choose_interval
from paceline.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult(Shown):
    """The best layouts for a model on a cluster, and what there is to say about them.

    ``as_written``: what the config itself asks for (None: ``not_judged`` says why), and ``changes`` what would make
    that fit. ``scaling``: the best plan for each number of devices, by ``strong`` and ``weak``.
    """

    request: PlanRequest
    found: Search
    as_written: Prediction | None = None
    not_judged: str = ""
    changes: tuple[Change, ...] = ()
    scaling: dict[str, tuple[ScalingRow, ...]] = field(default_factory=dict)
    price: float | None = None

    @property
    def plans(self) -> tuple[Prediction, ...]:
        return self.found.ranked

    @property
    def winner(self) -> Prediction | None:
        return self.plans[0] if self.plans else None

    @property
    def as_written_fits(self) -> bool:
        return self.as_written is not None and self.found.fits(self.as_written)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed of the model, and of a device that has no units for what it is to compute in."""
        device, kinds = self.request.cluster.device, {each.compute for each in self.request.tasks}
        missing = sorted(kinds - {*device.peak_flops, "tf32"})  # without tf32 it is fp32, as on every device
        return (
            *self.request.assumed,
            *(
                f"{device.name} has no units for {each}, and emulates it, at {device.peak(each) / 1e12:.4g} TFLOP/s at "
                f"best: its units are for {' and '.join(device.peak_flops)}"
                for each in missing
            ),
        )

    def facts(self) -> dict[str, object]:
        return {
            "cluster": self.request.cluster.name,
            "plans": len(self.plans),
            "best": self.winner or "nothing fits",
            "step": None if self.winner is None else format_seconds(self.winner.seconds),
        }

    def _repr_html_(self) -> str:
        rows = [(each, format_seconds(each.seconds), format_bytes(each.memory_bytes)) for each in self.plans[:5]]
        told = "nothing fits" if not rows else table(("plan", "step", "memory"), rows)
        return f"<b>PlanResult</b> on {html.escape(self.request.cluster.name)}: {told}"

    def explanations(self, top: int = 5) -> list[str]:
        others = [explain_against(self.plans[0], each) for each in self.plans[1:top]]
        return [explain_winner(self.found), *others] if self.plans else []

    @property
    def config(self) -> Config:
        """The config that trains the first plan. Raises UsageError where there is none."""
        workload = self._to_train().workload
        return config_from_dict(planned_values(self.request.config, workload, self.request.cluster), "plan")

    def to_yaml(self) -> str:
        """Returns the config of the first plan, with what is predicted for it on top. Raises UsageError for none."""
        winner, cluster = self._to_train(), self.request.cluster
        low, high = winner.band
        values = planned_values(self.request.config, winner.workload, cluster)
        return (
            f"# Planned for {cluster.name}: {winner}.\n"
            f"# Predicted: {format_seconds(winner.seconds)} a step ({format_seconds(low)} to {format_seconds(high)}), "
            f"{winner.tokens_per_s:,.0f} {winner.unit}/s, {format_bytes(winner.memory_bytes)} of a device's "
            f"{format_bytes(cluster.device.memory_bytes)}.\n"
        ) + dump_values(values)

    def with_snapshots(self, failure_s: float) -> tuple[PlanResult, str]:
        """Returns the plan with the interval of snapshots that loses least, where a failure comes so often, and why."""
        winner, config = self.plans[0], self.request.config
        every, why = choose_interval(config, self.request.cluster, winner.layout.ranks, winner.seconds, failure_s)
        memory = config.checkpoint.memory.model_copy(update={"every_steps": every or None})
        return replace(self, request=replace(self.request, config=config.with_values("checkpoint", memory=memory))), why

    def to_json(self, top: int = 5) -> dict[str, Any]:
        request, found, task = self.request, self.found, self.request.tasks[0]
        nearest, written = found.nearest, self.as_written
        return {
            "name": request.config.name,
            "parameters": task.model.params,
            "cluster": request.cluster.name,
            "devices": request.cluster.devices,
            "device": request.cluster.device.name,
            "global_batch": task.global_batch,
            "tokens_per_sample": task.seq_len,
            "assumed": list(self.assumed),
            "order": found.order,
            "price_per_device_hour": self.price,
            "looked_at": found.looked_at,
            "fit": found.num_fit,
            "left_out": found.left_out,
            "budget_bytes": found.budget,
            "plans": [_ranked(self, each) for each in found.ranked[:top]],
            "explanations": self.explanations(top),
            "nearest": None
            if nearest is None
            else {**_decided(task.workload(nearest.layout)), "memory_bytes": nearest.memory_bytes},
            "as_written": None if written is None else {**_ranked(self, written), "fits": self.as_written_fits},
            "as_written_not_judged": self.not_judged or None,
            "changes_that_fit": [
                {"keys": each.keys, "step_s": None if each.ranked is None else each.ranked.seconds}
                for each in self.changes
            ],
            "scaling": {name: [_row_json(self, row) for row in rows] for name, rows in self.scaling.items()},
        }

    def to_text(self, top: int = 5) -> str:
        return "\n".join(_lines(self, top))

    @property
    def shows_cost(self) -> bool:
        return self.price is not None or self.found.order == "cost"

    def cost_of(self, ranked: Prediction) -> dict[str, Any]:
        """Returns device-hours and, where these have a price, dollars: of a step, and of a billion tokens (samples)."""
        hours = ranked.seconds * ranked.layout.ranks / 3600
        billions = ranked.tokens_per_s * ranked.seconds / 1e9
        dollars = None if self.price is None else hours * self.price
        return {
            "hours_per_step": hours,
            "hours_per_billion": hours / billions,
            "per_step": dollars,
            "per_billion": None if dollars is None else dollars / billions,
        }

    def cheapest_row(self) -> ScalingRow | None:
        rows = self.scaling.get("strong", ())
        hours = [(self.cost_of(row.best)["hours_per_billion"], row) for row in rows if row.best]
        return min(hours, key=lambda each: each[0], default=(0.0, None))[1]

    def task_for(self, ranked: Prediction) -> TrainingTask:
        precision, tasks = ranked.layout.precision, self.request.tasks
        return next((task for task in tasks if task.base.precision == precision), tasks[0])

    def _to_train(self) -> Prediction:
        if self.request.no_config:
            raise UsageError(f"there is no config: {self.request.no_config}\n  a config's model cannot say that")
        if not self.plans:
            raise UsageError("there is no config: nothing fits\n  a plan's memory is at most 90 % of the device's")
        return self.plans[0]


def plan_for(
    request: PlanRequest, *, by: str = "time", gpus: Sequence[int] | None = None, price: float | None = None
) -> PlanResult:
    """Searches, and judges the config as it is written; ``gpus``: for tables of scaling. Raises UsageError."""
    order = next((each for each in ORDERS if by == each), None)
    if order is None:
        raise UsageError(f"by = {by}\n  plans are ranked by {', '.join(ORDERS)}\n  try by = time")
    if price is not None and not (isinstance(price, int | float) and math.isfinite(price) and price > 0):
        raise UsageError(
            f"price {price} of a device-hour\n  it is in dollars, and above 0\n  leave it out for device-hours"
        )
    found = _search(request, order)
    result = _judged(PlanResult(request=request, found=found, price=price))
    if not gpus:
        return result
    task = request.tasks[0] if result.winner is None else result.task_for(result.winner)
    cluster, memory = request.cluster, request.host_memory
    tables = {
        name: tuple(scaling_rows(task, cluster, gpus, weak=name == "weak", order=order, host_memory=memory))
        for name in ("strong", "weak")
    }
    return replace(result, scaling=tables)


def _search(request: PlanRequest, order: Order) -> Search:
    def keep(layout: Layout) -> bool:
        """Gradients that are compressed are those that replicas of a whole model average (plan/rules.py)."""
        is_plain = request.config.comm.compression.policy == "none"
        return is_plain or (not layout.is_split and layout.strategy in ("ddp", "hybrid"))

    found = [
        search(task, request.cluster, order=order, host_memory=request.host_memory, keep=keep) for task in request.tasks
    ]
    ranked = [each for one in found for each in one.ranked]
    ranked.sort(key=lambda each: each.memory_bytes if order == "memory" else each.seconds)  # stable: as they are asked
    nearest = min((one.nearest for one in found if one.nearest), key=lambda each: each.memory_bytes, default=None)
    return replace(
        found[0],
        ranked=tuple(ranked),
        num_fit=sum(one.num_fit for one in found),
        left_out=dict(sum((Counter(one.left_out) for one in found), Counter[str]())),
        nearest=None if ranked else nearest,
    )


def _judged(result: PlanResult) -> PlanResult:
    """Judges the config as it is written, or says why it is not; and what would make it fit, or anything."""
    request, found = result.request, result.found
    config, task = request.config, request.tasks[0]
    if not found.ranked:
        return replace(result, not_judged="nothing fits", changes=tuple(what_would_fit(found)))
    if request.no_config:
        return replace(result, not_judged=f"no config has this model: {request.no_config}")
    if task.names_precision:
        return replace(result, not_judged="its precision is not the one that is asked for")
    workload = workload_as_written(config, task, request.cluster)
    if workload is None:
        return replace(result, not_judged=why_not_written(config, request.cluster))
    result = replace(result, as_written=rank_one(workload, request.cluster, task.need))
    if result.as_written_fits:
        return result
    # A change of the mesh names a microbatch that follows from it, and what else the config fixes.
    named = [
        *(() if config.train.microbatch else ("train.microbatch",)),
        *(("train.accumulate",) if config.train.accumulate else ()),
        *(("parallel.data",) if config.parallel.data else ()),
    ]
    return replace(result, changes=tuple(smallest_changes(workload, found, named=named)))


def _row_json(result: PlanResult, row: ScalingRow) -> dict[str, Any]:
    start: dict[str, Any] = {"devices": row.devices, "global_batch": row.global_batch}
    if row.best is None:
        return {**start, "plan": None, "why": row.why}
    return {**start, **_ranked(result, row.best), "efficiency": row.efficiency}


def _ranked(result: PlanResult, ranked: Prediction) -> dict[str, Any]:
    step, (low, high) = ranked.step, ranked.band
    formula = asdict(ranked.memory)
    formula = {
        name: formula[name] for name in formula if name not in ("buffers", "host", "compression", "at_other_times")
    }
    need = result.task_for(ranked).need
    found = None if need is None else need.estimate(ranked.layout)  # None for a model that it does not know
    estimate = found and {name: value for name, value in asdict(found).items() if name not in ("host", "compression")}
    return {
        **_decided(ranked.workload),
        "step_s": ranked.seconds,
        "step_s_low": low,
        "step_s_high": high,
        "fitted": ranked.fitted,
        "outside": list(ranked.outside),
        "samples_per_s": ranked.samples_per_s,
        f"{ranked.unit}_per_s": ranked.tokens_per_s,
        "mfu": ranked.mfu,
        "communication_share": ranked.communication,
        "exposed_s": step.exposed + step.tensor_wait,
        "hidden_s": step.hidden,
        "bubble_s": step.bubble,
        "parts_s": asdict(step),
        "memory_bytes": ranked.memory_bytes,
        "host_bytes": host_bytes(ranked.workload),
        "memory_by_category": estimate or {**formula, "buffers": 0.0},
        "memory_by_formula": formula,
        "memory_by_estimate": estimate,
        "cost": result.cost_of(ranked),
    }


def _decided(workload: Workload) -> dict[str, Any]:
    layout = workload.layout
    return {
        "plan": str(workload),
        "strategy": layout.strategy,
        "mesh": {"pipeline": layout.pipeline, "replicate": layout.data // layout.shards}
        | {"shard": layout.shards, "tensor": layout.tensor},
        "expert": layout.expert,
        "schedule": layout.schedule_name if layout.pipeline > 1 else None,
        **{name: getattr(layout, name) for name in ("chunks", "microbatch", "accumulate")},
        "recompute": workload.recompute,
        "offload": list(layout.offload.parts),
        "bucket_mb": None if layout.bucket_mb == Layout().bucket_mb else layout.bucket_mb,
        "reshard_after_forward": layout.reshard_after_forward,
        "precision": layout.precision if workload.run.names_precision else None,
    }


def _lines(result: PlanResult, top: int) -> Iterator[str]:
    request = result.request
    task, cluster = request.tasks[0], request.cluster
    samples = "samples" if task.model.is_sampled else f"sequences of {task.seq_len} tokens"
    compute = "any precision" if len(request.tasks) > 1 else task.compute
    yield (
        f"{request.config.name}: {format_count(round(task.model.params))} parameters, {task.global_batch} {samples} "
        f"a step, {compute}, {task.framework}"
    )
    yield f"{cluster.name}: {cluster.devices} x {cluster.device.name}, {_gib(cluster.device.memory_bytes)} each"
    yield from (f"assumed: {line}" for line in result.assumed)
    found, winner = result.found, result.winner
    reasons = sorted(found.left_out.items(), key=lambda each: -each[1])
    left_out = f"; left out: {', '.join(f'{count} {reason}' for reason, count in reasons)}" if reasons else ""
    if winner is None:
        yield f"\nout of memory: none of {found.looked_at} ways fits{left_out}"
        if found.nearest is not None:
            need, workload = found.nearest.memory_bytes, task.workload(found.nearest.layout)
            yield f"nearest: {workload} needs {_gib(need)}, and {_gib(found.budget)} may be taken"
        yield from (f"would fit with {change}" for change in result.changes)
    else:
        yield f"\n{found.looked_at} ways looked at, {found.num_fit} fit{left_out}\n"
        yield from _plans(result, winner, top)
        yield from _verdict(result, winner)
    yield from _scaling(result)


def _plans(result: PlanResult, winner: Prediction, top: int) -> Iterator[str]:
    yield f"{'':>3} {_heading(result)}  plan"
    for number, each in enumerate(result.plans[:top], 1):
        yield f"{number:>3} {_figures(result, each)}  {each}"
    yield ""
    for number, sentence in enumerate(result.explanations(top), 1):
        yield f"{number}: {sentence}."
    low, high = map(format_seconds, winner.band)
    source = "constants were fitted on published runs of this generation, kind of framework and size"
    if not winner.fitted:
        source = "OUTSIDE the calibrated domain: "
        source += "; ".join(winner.outside) or "nothing like it was fitted"
    yield f"\nstep of the first between {low} and {high}; {source} (docs/prediction.md)"
    if result.task_for(winner).need is None:
        yield "memory is by formula: this package does not build the model"
    else:
        yield "memory is by formula; paceline predict shows the same, and what a dry run of the engine holds"
    if on_host := host_bytes(winner.workload):
        yield f"the first has {_gib(on_host)} of each rank in its host's memory, which is not in the catalog"


def _verdict(result: PlanResult, winner: Prediction) -> Iterator[str]:
    ranked, found = result.as_written, result.found
    if ranked is None:
        yield f"as written: not judged, as {result.not_judged}"
        return
    if result.as_written_fits:
        yield f"as written ({ranked}): fits, {ranked.seconds / winner.seconds:.2f} x the first plan's time"
        return
    needs, has, where = ranked.memory_bytes, found.budget, ""
    if needs <= has:
        needs, has, where = node_bytes(ranked.workload, found.cluster), found.host_memory, " of the host"
    yield f"as written ({ranked}): out of memory{where}, needs {_gib(needs)} and {_gib(has)} may be taken"
    yield from (f"  fits with {change}" for change in result.changes)


def _scaling(result: PlanResult) -> Iterator[str]:
    for name, rows in result.scaling.items():
        yield f"\n{name} scaling ({'same batch' if name == 'strong' else 'same samples a device'})"
        heading = _heading(result, has_cost=any(row.best for row in rows))
        yield f"{'GPUs':>6} {'batch':>7} {heading} {'eff.':>6}"
        for row in rows:
            told = row.why if row.best is None else f"{_figures(result, row.best)} {row.efficiency:>6.1%}  {row.best}"
            yield f"{row.devices:>6} {row.global_batch:>7} {told}"
    cheapest = result.cheapest_row()
    if result.found.order == "cost" and cheapest is not None:
        yield f"\ncheapest of these, with the same batch: {cheapest.devices} devices"


def _heading(result: PlanResult, *, has_cost: bool = True) -> str:
    unit, billion = ("samples", "G") if result.request.tasks[0].model.is_sampled else ("tokens", "B")
    cost = f"{'h' if result.price is None else '$'}/{billion} {unit}"
    shown = f" {cost:>12}" if has_cost and result.shows_cost else ""
    return f"{'step':>10} {f'{unit}/s':>12} {'MFU':>6} {'waits':>6} {'memory':>10}{shown}"


def _figures(result: PlanResult, ranked: Prediction) -> str:
    cost = result.cost_of(ranked)
    billion = cost["hours_per_billion"] if result.price is None else cost["per_billion"]
    return (
        f"{format_seconds(ranked.seconds):>10} {ranked.tokens_per_s:>12,.0f} {ranked.mfu:>6.1%} "
        f"{ranked.communication:>6.1%} {_gib(ranked.memory_bytes):>10}"
    ) + (f" {billion:>12,.2f}" if result.shows_cost else "")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
