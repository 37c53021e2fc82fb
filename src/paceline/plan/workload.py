"""A training step as data: the shape of the model, its layout, and what a framework does with that."""

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

# What each ``checkpoint_activations`` of a layout computes again; the others have no formula.
RECOMPUTES: Mapping[str, Recompute] = {"none": "none", "matmuls": "selective", "full": "full"}


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a framework does with a layout: precision of its kernels, what it fuses and keeps, the length of samples.

    ``micro_batch``, ``global_batch``: where a table counts them in tokens, or they do not divide; 0: the layout's.
    ``recomputes_attention``: of what a layout that keeps matrix products computes again, attention alone.
    ``fused_loss``: where the framework's own loss is not, one that passes over the logits once is used in its place.
    ``split_loss``: tensor-parallel ranks of torch keep their part of the logits, and gather none of them.
    ``is_flat``: parameters are sharded as flat buffers, beside copies in their own shapes.
    ``overlaps_tensor``: half of what tensor-parallel ranks send is hidden behind products.
    ``names_precision``: the layout's precision was searched for, and is named where the layout is described.
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
    overlaps_tensor: bool = False
    names_precision: bool = False
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

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch that a rank computes."""
        return self.micro_batch * self.run.seq_len / self.layout.context

    @property
    def micro_batch(self) -> float:
        return self.run.micro_batch or self.layout.microbatch

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one data-parallel rank."""
        if not self.run.global_batch:
            return self.layout.accumulate
        return max(1, round(self.run.global_batch / (self.micro_batch * self.layout.data)))

    @property
    def global_batch(self) -> float:
        return self.run.global_batch or self.micro_batch * self.layout.accumulate * self.layout.data

    @property
    def recompute(self) -> Recompute:
        """What is computed again in the backward, in the words of the formulas."""
        found = RECOMPUTES[self.layout.checkpoint_activations]
        return "attention" if found == "selective" and self.run.recomputes_attention else found


def stage_layers(layers: int, stages: int) -> list[int]:
    """Returns layers by stage, as even as can be, the larger ones first."""
    return [layers // stages + (place < layers % stages) for place in range(stages)]
