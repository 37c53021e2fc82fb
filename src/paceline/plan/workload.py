"""A training step as data: a model's shape, its layout, what a framework does with that; a layout in words and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape

Framework: TypeAlias = Literal["eager", "compiled", "megatron"]
Recompute: TypeAlias = Literal["none", "selective", "attention", "full"]
Compute: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
Scaling: TypeAlias = Literal["", "row", "block"]
Shown: TypeAlias = Literal["all", "activations", "states"]
Graphs: TypeAlias = Literal["none", "layers", "step"]
Value: TypeAlias = int | float | str | bool | list[str]  # of a config's key

# What each ``checkpoint_activations`` of a layout computes again, in the blocks that it is for.
RECOMPUTES: Mapping[str, Recompute] = {
    "none": "none",
    "matmuls": "selective",
    "full": "full",
    "every_2": "full",
    "every_3": "full",
    "every_4": "full",
}
_USUAL = Layout()


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a framework does with a layout: precision of its kernels, what it fuses and keeps, the length of samples.

    ``micro_batch``, ``global_batch``: where a table counts them in tokens, or they do not divide; 0: the layout's.
    ``recomputes_attention``: of what a layout that keeps matrix products computes again, attention alone.
    ``fused_loss``: one that passes over logits once. ``split_loss``: tensor-parallel ranks of torch gather no logits.
    ``is_flat``: parameters are sharded as flat buffers, beside copies in their own shapes. ``keeps_gradients``: sharded
    ones are whole, in fp32, until the last microbatch. ``overlaps_tensor``: half of what tensor-parallel ranks send is
    hidden. ``names_precision``: the precision was searched for. ``attends_as_today``: by cuDNN's kernels of 2025.
    ``sends_copies``: a row goes to each of its experts, not once to each place that has some. ``hides_dispatch``:
    behind another microbatch. ``graphs``: what the host launches as CUDA graphs; experts, if ``layers``, one by one.
    """

    seq_len: int
    compute: Compute
    micro_batch: float = 0.0
    global_batch: float = 0.0
    recomputes_attention: bool = False
    framework: Framework = "eager"
    fused_attention: bool = True
    pure: bool = False
    autocast: bool = False
    scaling: Scaling = ""
    fp8_gather: bool = False
    fused_loss: bool = False
    split_loss: bool = False
    is_flat: bool = False
    keeps_gradients: bool = False
    overlaps_tensor: bool = False
    names_precision: bool = False
    attends_as_today: bool = False
    sends_copies: bool = False
    hides_dispatch: bool = False
    graphs: Graphs = "none"
    shown: Shown = "all"

    @property
    def is_wide(self) -> bool:
        return self.compute in ("fp32", "tf32")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything a prediction is made from, but the machine. The layout is decided: it has no 0 left to fill in."""

    model: ModelShape
    layout: Layout
    run: Running

    def __str__(self) -> str:
        return layout_text(self.layout, names_precision=self.run.names_precision)

    @property
    def tokens(self) -> float:
        return self.micro_batch * self.run.seq_len / self.layout.context_ranks

    @property
    def micro_batch(self) -> float:
        return self.run.micro_batch or self.layout.microbatch

    @property
    def microbatches(self) -> int:
        if not self.run.global_batch:
            return self.layout.accumulate
        return max(1, round(self.run.global_batch / (self.micro_batch * self.layout.data)))

    @property
    def reduces_once(self) -> bool:
        """Whether gradients of fully sharded parameters are reduced behind the last of several microbatches alone."""
        return self.run.keeps_gradients and self.layout.is_fully_sharded and self.microbatches > 1

    @property
    def global_batch(self) -> float:
        return self.run.global_batch or self.micro_batch * self.layout.accumulate * self.layout.data

    @property
    def recompute(self) -> Recompute:
        found = RECOMPUTES[self.layout.checkpoint_activations]
        return "attention" if found == "selective" and self.run.recomputes_attention else found

    @property
    def recomputed_blocks(self) -> float:
        """The share of the blocks that are computed again, as far as ``recompute`` says."""
        policy = self.layout.checkpoint_activations
        return 1 / int(policy[-1]) if policy.startswith("every_") else 1.0


def stage_layers(layers: int, stages: int) -> list[int]:
    """Returns layers by stage, as even as can be, the larger ones first."""
    return [layers // stages + (place < layers % stages) for place in range(stages)]


def layout_text(layout: Layout, *, names_precision: bool = False) -> str:
    """Says how a run is laid out, with its microbatches: ``fsdp over 8, tensor 2, microbatch 4 x 2``."""
    parts = [f"{layout.strategy} over {layout.data * layout.context_ranks}"]
    if layout.strategy == "hybrid":
        parts = [f"hybrid, {layout.shards} ranks a copy, over {layout.data}"]
    parts += [f"context {layout.context_ranks}"] if layout.context_ranks > 1 else []
    parts += [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
    parts += [f"expert {layout.expert}"] if layout.expert > 1 else []
    if layout.pipeline > 1:
        parts.append(f"pipeline {layout.pipeline}" + (f" x {layout.chunks} chunks" if layout.chunks > 1 else ""))
    parts += [layout.schedule_name] if layout.splits_backward else []
    parts.append(f"microbatch {layout.microbatch} x {layout.accumulate}")
    policy = layout.checkpoint_activations
    recompute = policy if policy.startswith("every_") else RECOMPUTES[policy]
    parts += [f"recompute {recompute}"] if recompute != "none" else []
    parts += [tiles_text(layout)] if layout.mlp_tiles != 1 else []
    parts += [f"offload {' and '.join(layout.offload.parts)}"] if layout.offload.is_any else []
    parts += [f"buckets of {layout.bucket_mb:g} MiB"] if layout.bucket_mb != _USUAL.bucket_mb else []
    parts += [] if layout.reshard_after_forward else ["gathered once a microbatch"]
    parts += [layout.precision] if names_precision else []
    return ", ".join(parts)


def layout_label(layout: Layout) -> str:
    """Says in a few words what memory depends on: ``fsdp, checkpoint full``."""
    name = f"hybrid in groups of {layout.shards}" if layout.strategy == "hybrid" else layout.strategy
    parts = [mesh_text(layout), *([name] if layout.data > 1 else [])] if layout.is_split else [name]
    if layout.checkpoint_activations != "none":
        parts.append(f"checkpoint {layout.checkpoint_activations}")
    if layout.mlp_tiles != 1:
        parts.append(tiles_text(layout))
    if layout.offload.is_any:
        parts.append("offload " + " and ".join(layout.offload.parts))
    return ", ".join(parts)


def tiles_text(layout: Layout) -> str:
    return f"MLPs in {layout.mlp_tiles or ''} tiles".replace("  ", " ")


def mesh_text(layout: Layout) -> str:
    """Names the axes: ``pipeline 2 x tensor 4 x data 8``, ``data 64``."""
    degrees = {"pipeline": layout.pipeline, "context": layout.context_ranks, "tensor": layout.tensor}
    return " x ".join([*(f"{name} {size}" for name, size in degrees.items() if size > 1), f"data {layout.data}"])


def config_values(layout: Layout, *, names_precision: bool = False) -> dict[str, Value]:
    """Returns the keys of a config that say a layout, without the global batch and those that have no effect."""
    rows: tuple[tuple[str, Value, bool], ...] = (  # a key, its value, and whether it has an effect
        ("parallel.strategy", layout.strategy, True),
        ("parallel.shard_ranks", layout.shards, layout.strategy == "hybrid"),
        ("parallel.pipeline", layout.pipeline, True),
        ("parallel.schedule", layout.schedule_name, layout.pipeline > 1),
        ("parallel.chunks", layout.chunks, layout.chunks > 1),
        ("parallel.context", layout.context_ranks, layout.context_ranks > 1),
        ("parallel.context_method", layout.context_method, layout.context_ranks > 1),
        ("parallel.tensor", layout.tensor, True),
        ("parallel.expert", layout.expert, layout.expert > 1),
        ("parallel.sequence_parallel", layout.sequence_parallel, layout.tensor > 1),
        ("parallel.reshard_after_forward", False, not layout.reshard_after_forward),
        ("memory.checkpoint_activations", layout.checkpoint_activations, True),
        ("memory.mlp_tiles", layout.mlp_tiles or "auto", layout.mlp_tiles != 1),
        ("memory.offload", list(layout.offload.parts), layout.offload.is_any),
        ("comm.bucket_mb", layout.bucket_mb, layout.bucket_mb != _USUAL.bucket_mb),
        ("train.precision", layout.precision, names_precision),
        ("train.microbatch", layout.microbatch, True),
    )
    return {key: value for key, value, is_read in rows if is_read}


def count_differences(one: Layout, other: Layout) -> int:
    """Counts the decisions in which two layouts differ; those that follow from others are not counted."""
    decided = (
        *("pipeline", "context_ranks", "tensor", "microbatch", "precision"),
        *("checkpoint_activations", "offload", "bucket_mb"),
    )

    def decisions(layout: Layout) -> list[object]:
        strategy = (layout.strategy, layout.shards if layout.strategy == "hybrid" else 0)
        schedule = (layout.schedule_name, layout.chunks) if layout.pipeline > 1 else None
        return [strategy, schedule, layout.reshard_after_forward, *(getattr(layout, name) for name in decided)]

    return sum(mine != theirs for mine, theirs in zip(decisions(one), decisions(other), strict=True))
