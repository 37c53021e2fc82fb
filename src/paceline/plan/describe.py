"""A layout in words, and in the keys of a config: one place for all who show or write one."""

from __future__ import annotations

from typing import TypeAlias

from paceline.plan.layout import Layout
from paceline.plan.workload import RECOMPUTES

Value: TypeAlias = int | float | str | bool | list[str]

_BUCKET_MB = Layout().bucket_mb


def layout_text(layout: Layout, *, names_precision: bool = False) -> str:
    """Says how a run is laid out, with its microbatches: ``fsdp over 8, tensor 2, microbatch 4 x 2``."""
    parts = [f"{layout.strategy} over {layout.data}"]
    if layout.strategy == "hybrid":
        parts = [f"hybrid, {layout.shards} ranks a copy, over {layout.data}"]
    parts += [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
    parts += [f"expert {layout.expert}"] if layout.expert > 1 else []
    if layout.pipeline > 1:
        parts.append(f"pipeline {layout.pipeline}" + (f" x {layout.chunks} chunks" if layout.chunks > 1 else ""))
    parts += [layout.schedule_name] if layout.splits_backward else []
    parts.append(f"microbatch {layout.microbatch} x {layout.accumulate}")
    recompute = RECOMPUTES.get(layout.checkpoint_activations, layout.checkpoint_activations)
    parts += [f"recompute {recompute}"] if recompute != "none" else []
    parts += [f"offload {' and '.join(layout.offload.parts)}"] if layout.offload.is_any else []
    parts += [f"buckets of {layout.bucket_mb:g} MiB"] if layout.bucket_mb != _BUCKET_MB else []
    parts += [] if layout.reshard_after_forward else ["gathered once a microbatch"]
    parts += [layout.precision] if names_precision else []
    return ", ".join(parts)


def layout_label(layout: Layout) -> str:
    """Says in a few words what memory depends on: ``fsdp, checkpoint full``."""
    name = f"hybrid in groups of {layout.shards}" if layout.strategy == "hybrid" else layout.strategy
    parts = [mesh_text(layout), *([name] if layout.data > 1 else [])] if layout.is_split else [name]
    if layout.checkpoint_activations != "none":
        parts.append(f"checkpoint {layout.checkpoint_activations}")
    if layout.offload.is_any:
        parts.append("offload " + " and ".join(layout.offload.parts))
    return ", ".join(parts)


def mesh_text(layout: Layout) -> str:
    """Names the axes: ``pipeline 2 x tensor 4 x data 8``, ``data 64``."""
    degrees = {"pipeline": layout.pipeline, "tensor": layout.tensor}
    return " x ".join([*(f"{name} {size}" for name, size in degrees.items() if size > 1), f"data {layout.data}"])


def config_values(layout: Layout, *, names_precision: bool = False) -> dict[str, Value]:
    """Returns the keys of a config that say it, without those that have no effect, and without the global batch."""
    found: dict[str, Value] = {"parallel.strategy": layout.strategy}
    if layout.strategy == "hybrid":
        found["parallel.shard_ranks"] = layout.shards
    found["parallel.pipeline"] = layout.pipeline
    if layout.pipeline > 1:
        found["parallel.schedule"] = layout.schedule_name
    if layout.chunks > 1:
        found["parallel.chunks"] = layout.chunks
    found["parallel.tensor"] = layout.tensor
    if layout.tensor > 1:
        found["parallel.sequence_parallel"] = layout.sequence_parallel
    if not layout.reshard_after_forward:
        found["parallel.reshard_after_forward"] = False
    found["memory.checkpoint_activations"] = layout.checkpoint_activations
    if layout.offload.is_any:
        found["memory.offload"] = list(layout.offload.parts)
    if layout.bucket_mb != _BUCKET_MB:
        found["comm.bucket_mb"] = layout.bucket_mb
    if names_precision:
        found["train.precision"] = layout.precision
    found["train.microbatch"] = layout.microbatch
    return found


def count_differences(one: Layout, other: Layout) -> int:
    """Counts the decisions in which two layouts differ; those that follow from others are not counted."""
    return sum(mine != theirs for mine, theirs in zip(_decisions(one), _decisions(other), strict=True))


def _decisions(layout: Layout) -> tuple[object, ...]:
    return (
        (layout.strategy, layout.shards if layout.strategy == "hybrid" else 0),
        layout.pipeline,
        (layout.schedule_name, layout.chunks) if layout.pipeline > 1 else None,
        layout.tensor,
        layout.microbatch,
        layout.precision,
        layout.checkpoint_activations,
        layout.offload,
        layout.bucket_mb,
        layout.reshard_after_forward,
    )
