"""The result of a search for the best layout, in every form: objects, a config, text, JSON.

    cost of a step = seconds x devices x price of a device-hour / 3600

Prices change from week to week and from contract to contract, so that the catalog has none: without one, costs are in
device-hours.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.notebook import Shown, table
from paceline.plan.layout import Layout
from paceline.plan.workload import Workload
from paceline.search.candidates import TrainingTask
from paceline.search.from_config import planned_values, planned_yaml
from paceline.search.request import PlanRequest
from paceline.search.scaling import ScalingRow
from paceline.search.search import Change, Ranked, Search, explain_against, explain_winner, node_bytes, workload_text
from paceline.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Device-hours and, where a device-hour has a price, dollars: of a step, and of a billion tokens (or samples)."""

    hours_per_step: float
    hours_per_billion: float
    per_step: float | None = None
    per_billion: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult(Shown):
    """The best layouts that were found for a model on a cluster, and what there is to say about them.

    ``as_written``: what the config itself asks for, and ``changes`` what would make that fit.
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
        return self.found.ranked

    @property
    def winner(self) -> Ranked | None:
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

    def to_json(self, top: int = 5) -> dict[str, Any]:
        """Returns all of it as plain data, of the plans the first few."""
        return _json(self, top)

    def to_text(self, top: int = 5) -> str:
        return "\n".join(_lines(self, top))

    def cost_of(self, ranked: Ranked) -> PlanCost:
        hours = ranked.seconds * ranked.layout.ranks / 3600
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

    def task_for(self, ranked: Ranked) -> TrainingTask:
        """Returns the task in the precision of a plan."""
        precision, tasks = ranked.layout.precision, self.request.tasks
        return next((task for task in tasks if task.base.precision == precision), tasks[0])

    def _to_train(self) -> Ranked:
        if self.request.no_config:
            raise UsageError(f"there is no config: {self.request.no_config}\n  a config's model cannot say that")
        if not self.plans:
            raise UsageError("there is no config: nothing fits\n  a plan's memory is at most 90 % of the device's")
        return self.plans[0]


# As plain data.


def _json(result: PlanResult, top: int) -> dict[str, Any]:
    """Returns all of a result, with so many of its plans."""
    request, found, task = result.request, result.found, result.request.tasks[0]
    return {
        "name": request.config.name,
        "parameters": task.model.params,
        "cluster": request.cluster.name,
        "devices": request.cluster.devices,
        "device": request.cluster.device.name,
        "global_batch": task.global_batch,
        "tokens_per_sample": task.seq_len,
        "assumed": list(result.assumed),
        "order": found.order,
        "price_per_device_hour": result.price,
        "looked_at": found.looked_at,
        "fit": found.num_fit,
        "left_out": found.left_out,
        "budget_bytes": found.budget,
        "plans": [_ranked(result, each) for each in found.ranked[:top]],
        "explanations": result.explanations(top),
        "nearest": None if found.nearest is None else {**_decided(found.nearest[0]), "memory_bytes": found.nearest[1]},
        "as_written": None
        if result.as_written is None
        else {**_ranked(result, result.as_written), "fits": result.as_written_fits},
        "as_written_not_judged": result.not_judged or None,
        "changes_that_fit": [
            {"keys": each.keys, "step_s": None if each.ranked is None else each.ranked.seconds}
            for each in result.changes
        ],
        "scaling": {name: [_row_json(result, row) for row in rows] for name, rows in result.scaling.items()},
    }


def _ranked(result: PlanResult, ranked: Ranked) -> dict[str, Any]:
    step, (low, high) = ranked.prediction.step, ranked.prediction.band
    return {
        **_decided(ranked.workload),
        "step_s": ranked.seconds,
        "step_s_low": low,
        "step_s_high": high,
        "fitted": ranked.prediction.fitted,
        "outside": list(ranked.prediction.outside),
        "samples_per_s": ranked.samples_per_s,
        f"{ranked.unit}_per_s": ranked.tokens_per_s,
        "mfu": ranked.mfu,
        "communication_share": ranked.communication,
        "exposed_s": step.exposed + step.tensor_wait,
        "hidden_s": step.hidden,
        "bubble_s": step.bubble,
        "parts_s": asdict(step),
        "memory_bytes": ranked.memory_bytes,
        "host_bytes": ranked.host_bytes,
        "memory_by_category": _categories(result, ranked),
        "memory_by_formula": _by_formula(ranked),
        "memory_by_estimate": _estimate(result, ranked),
        "cost": asdict(result.cost_of(ranked)),
    }


def _categories(result: PlanResult, ranked: Ranked) -> dict[str, float]:
    """Of what ``memory_bytes`` is: of the estimate that the engines are checked against, or of the formulas."""
    return _estimate(result, ranked) or {**_by_formula(ranked), "buffers": 0.0}


def _by_formula(ranked: Ranked) -> dict[str, float]:
    names = ("parameters", "gradients", "optimizer", "activations", "temporary", "framework")
    return {name: getattr(ranked.prediction.memory, name) for name in names}


def _estimate(result: PlanResult, ranked: Ranked) -> dict[str, float] | None:
    """By the estimate; None for a model that it does not know."""
    need = result.task_for(ranked).need
    found = None if need is None else need.estimate(ranked.layout)
    if found is None:
        return None
    return {name: value for name, value in asdict(found).items() if name not in ("host", "compression")}


def _decided(workload: Workload) -> dict[str, Any]:
    layout = workload.layout
    return {
        "plan": workload_text(workload),
        "strategy": layout.strategy,
        "mesh": {
            "pipeline": layout.pipeline,
            "replicate": layout.data // layout.shards,
            "shard": layout.shards,
            "tensor": layout.tensor,
        },
        "expert": layout.expert,
        "schedule": layout.schedule_name if layout.pipeline > 1 else None,
        "chunks": layout.chunks,
        "microbatch": layout.microbatch,
        "accumulate": layout.accumulate,
        "recompute": workload.recompute,
        "offload": list(layout.offload.parts),
        "bucket_mb": None if layout.bucket_mb == Layout().bucket_mb else layout.bucket_mb,
        "reshard_after_forward": layout.reshard_after_forward,
        "precision": layout.precision if workload.run.names_precision else None,
    }


def _row_json(result: PlanResult, row: ScalingRow) -> dict[str, Any]:
    start: dict[str, Any] = {"devices": row.devices, "global_batch": row.global_batch}
    if row.best is None:
        return {**start, "plan": None, "why": row.why}
    return {**start, **_ranked(result, row.best), "efficiency": row.efficiency}


# As text: a table of the first ways, sentences that tell them apart, a verdict on the config, scaling.


def _lines(result: PlanResult, top: int) -> Iterator[str]:
    """Iterates over what a person wants to know of a result, with so many of its plans."""
    request = result.request
    task, cluster = request.tasks[0], request.cluster
    samples = (
        f"{task.global_batch} samples"
        if task.model.is_sampled
        else f"{task.global_batch} sequences of {task.seq_len} tokens"
    )
    compute = "any precision" if len(request.tasks) > 1 else task.compute
    yield (
        f"{request.config.name}: {format_count(round(task.model.params))} parameters, {samples} a step, {compute}, "
        f"{task.framework}"
    )
    yield f"{cluster.name}: {cluster.devices} x {cluster.device.name}, {_gib(cluster.device.memory_bytes)} each"
    yield from (f"assumed: {line}" for line in result.assumed)
    if result.winner is None:
        yield from _nothing(result)
    else:
        yield from _plans(result, result.winner, top)
        yield from _verdict(result, result.winner)
    yield from _scaling(result)


def _plans(result: PlanResult, winner: Ranked, top: int) -> Iterator[str]:
    found, unit = result.found, winner.unit
    yield f"\n{found.looked_at} ways looked at, {found.num_fit} fit{_reasons(found)}\n"
    cost = f" {_cost_head(result, winner):>12}" if _shows_cost(result) else ""
    yield f"{'':>3} {'step':>10} {f'{unit}/s':>12} {'MFU':>6} {'waits':>6} {'memory':>10}{cost}  plan"
    for number, each in enumerate(result.plans[:top], 1):
        yield f"{number:>3} {_figures(result, each)}  {each}"
    yield ""
    for number, sentence in enumerate(result.explanations(top), 1):
        yield f"{number}: {sentence}."
    yield f"\n{_domain(winner)}"
    yield f"memory is {_memory_source(result, winner)}"
    if winner.host_bytes:
        yield f"the first has {_gib(winner.host_bytes)} of each rank in its host's memory, which is not in the catalog"


def _memory_source(result: PlanResult, winner: Ranked) -> str:
    if result.task_for(winner).need is None:
        return "by formula: this package does not build the model"
    return "an upper bound; paceline predict shows the same bound, and what a dry run of the engine holds"


def _nothing(result: PlanResult) -> Iterator[str]:
    found = result.found
    yield f"\nout of memory: none of {found.looked_at} ways fits{_reasons(found)}"
    if found.nearest is not None:
        workload, need = found.nearest
        yield f"nearest: {workload_text(workload)} needs {_gib(need)}, and {_gib(found.budget)} may be taken"
    yield from (f"would fit with {change}" for change in result.changes)


def _verdict(result: PlanResult, winner: Ranked) -> Iterator[str]:
    ranked, found = result.as_written, result.found
    if ranked is None:
        yield f"as written: not judged, as {result.not_judged}"
        return
    if result.as_written_fits:
        slower = ranked.seconds / winner.seconds
        yield f"as written ({ranked}): fits, {slower:.2f} x the first plan's time"
        return
    needs, room, where = ranked.memory_bytes, found.budget, ""
    if needs <= room:
        needs, room, where = node_bytes(ranked.workload, found.cluster), found.host_memory, " of the host"
    yield (f"as written ({ranked}): out of memory{where}, needs {_gib(needs)} and {_gib(room)} may be taken")
    yield from (f"  fits with {change}" for change in result.changes)


def _scaling(result: PlanResult) -> Iterator[str]:
    unit = "samples" if result.request.tasks[0].model.is_sampled else "tokens"
    for name, rows in result.scaling.items():
        yield f"\n{name} scaling ({'same batch' if name == 'strong' else 'same samples a device'})"
        best = next((row.best for row in rows if row.best is not None), None)
        cost = f" {_cost_head(result, best):>12}" if _shows_cost(result) and best else ""
        yield (
            f"{'GPUs':>6} {'batch':>7} {'step':>10} {f'{unit}/s':>12} {'MFU':>6} {'waits':>6} {'memory':>10}{cost} "
            f"{'eff.':>6}"
        )
        for row in rows:
            start = f"{row.devices:>6} {row.global_batch:>7}"
            if row.best is None:
                yield f"{start} {row.why}"
            else:
                yield f"{start} {_figures(result, row.best)} {row.efficiency:>6.1%}  {row.best}"
    cheapest = result.cheapest_row()
    if result.found.order == "cost" and cheapest is not None:
        yield f"\ncheapest of these, with the same batch: {cheapest.devices} devices"


def _figures(result: PlanResult, ranked: Ranked) -> str:
    cost = f" {_cost(result, ranked):>12}" if _shows_cost(result) else ""
    return (
        f"{format_seconds(ranked.seconds):>10} {ranked.tokens_per_s:>12,.0f} {ranked.mfu:>6.1%} "
        f"{ranked.communication:>6.1%} {_gib(ranked.memory_bytes):>10}{cost}"
    )


def _shows_cost(result: PlanResult) -> bool:
    return result.price is not None or result.found.order == "cost"


def _cost_head(result: PlanResult, ranked: Ranked) -> str:
    each = "G" if ranked.unit == "samples" else "B"
    return f"{'h' if result.price is None else '$'}/{each} {ranked.unit[:7]}"


def _cost(result: PlanResult, ranked: Ranked) -> str:
    cost = result.cost_of(ranked)
    return f"{cost.hours_per_billion if cost.per_billion is None else cost.per_billion:,.2f}"


def _reasons(found: Search) -> str:
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(found.left_out.items(), key=lambda each: -each[1]))
    return f"; left out: {told}" if told else ""


def _domain(winner: Ranked) -> str:
    low, high = winner.prediction.band
    source = "constants were fitted on published runs of this generation, kind of framework and size"
    if not winner.prediction.fitted:
        reasons = "; ".join(winner.prediction.outside) or "nothing like it was fitted"
        source = f"OUTSIDE the calibrated domain: {reasons}"
    return f"step of the first between {format_seconds(low)} and {format_seconds(high)}; {source} (docs/prediction.md)"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
