"""A plan as plain data for ``--json``: what was decided, seconds by part, bytes by category, cost, band."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.plan.layout import Layout
from paceline.plan.workload import Workload
from paceline.search.findings import PlanFindings
from paceline.search.scaling import ScalingRow
from paceline.search.search import Ranked, workload_text


def result_json(result: PlanFindings, top: int) -> dict[str, Any]:
    """Returns all of a result, with so many of its plans."""
    request, found, task = result.request, result.found, result.request.task
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
        "plans": [ranked_json(result, each) for each in found.ranked[:top]],
        "explanations": result.explanations(top),
        "nearest": None if found.nearest is None else {**_decided(found.nearest[0]), "memory_bytes": found.nearest[1]},
        "as_written": None
        if result.as_written is None
        else {**ranked_json(result, result.as_written), "fits": result.as_written_fits},
        "as_written_not_judged": result.not_judged or None,
        "changes_that_fit": [
            {"keys": each.keys, "step_s": None if each.ranked is None else each.ranked.seconds}
            for each in result.changes
        ],
        "scaling": {name: [_row_json(result, row) for row in rows] for name, rows in result.scaling.items()},
    }


def ranked_json(result: PlanFindings, ranked: Ranked) -> dict[str, Any]:
    """Returns one plan."""
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
        "memory_by_formula": asdict(ranked.prediction.memory),
        "memory_by_estimate": _estimate(result, ranked),
        "cost": asdict(result.cost_of(ranked)),
    }


def _categories(result: PlanFindings, ranked: Ranked) -> dict[str, float]:
    """Of what ``memory_bytes`` is: of the estimate that the engines are checked against, or of the formulas.

    The larger of the two decides what fits.
    """
    found = _estimate(result, ranked)
    is_larger = found is not None and sum(found.values()) >= ranked.memory_bytes * (1 - 1e-9)
    return found if found is not None and is_larger else {**asdict(ranked.prediction.memory), "buffers": 0.0}


def _estimate(result: PlanFindings, ranked: Ranked) -> dict[str, float] | None:
    """By the estimate; None for a model that it does not know."""
    need = result.way_of(ranked).need
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


def _row_json(result: PlanFindings, row: ScalingRow) -> dict[str, Any]:
    start: dict[str, Any] = {"devices": row.devices, "global_batch": row.global_batch}
    if row.best is None:
        return {**start, "plan": None, "why": row.why}
    return {**start, **ranked_json(result, row.best), "efficiency": row.efficiency}
