"""A training step as data: the shape of the model, its layout, and what a framework does with that.

Parameters of a transformer with L layers of width h, a of h being queries and g of it keys and values together, MLP
width f in k matrices (3 where it is gated), vocabulary V:

    L (h (2 a + g) + k h f) + V h (twice where the head is not tied)

A mixture of experts has k h f for each expert; a token passes through some of them only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from paceline.plan.layout import Layout

Framework: TypeAlias = Literal["eager", "compiled", "megatron"]
Recompute: TypeAlias = Literal["none", "selective", "attention", "full"]
Compute: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
Scaling: TypeAlias = Literal["", "row", "block"]
Shown: TypeAlias = Literal["all", "activations", "states"]

# What each ``checkpoint_activations`` of a layout computes again; the others have no formula.
RECOMPUTES: Mapping[str, Recompute] = {"none": "none", "matmuls": "selective", "full": "full"}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer. ``experts`` is 0 for a dense one; with experts, ``ffn`` is the width of one of them.

    ``score_dim``: where scores and values of a head differ in size (latent attention), their mean; else 0.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    causal: bool = True
    head_dim: int = 0
    experts: int = 0
    active_experts: int = 0
    total_params: float = 0.0
    score_dim: int = 0

    @property
    def score_width(self) -> int:
        """Over all heads: 4 x this x length are the FLOPs of one token's attention."""
        return self.heads * self.score_dim or self.query_width

    @property
    def query_width(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        return 2 * self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def attention_params(self) -> float:
        return self.hidden * (2 * self.query_width + self.kv_width)

    @property
    def expert_params(self) -> float:
        return self.matrices * self.hidden * self.ffn

    @property
    def mlp_params(self) -> float:
        """Of one layer, over all its experts; where the count of all is given, what is left of it."""
        if self.total_params and self.experts:
            return (self.total_params - self.end_params) / self.layers - self.attention_params
        return self.expert_params * max(1, self.experts)

    @property
    def active_mlp_params(self) -> float:
        return self.expert_params * (self.active_experts if self.experts else 1)

    @property
    def layer_params(self) -> float:
        """Of one layer, with biases and norms left out, which are less than a thousandth."""
        return self.attention_params + self.mlp_params

    @property
    def end_params(self) -> float:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @cached_property
    def params(self) -> float:
        return self.total_params or self.layers * self.layer_params + self.end_params

    @cached_property
    def active_matmul_params(self) -> float:
        """Weights that one token is multiplied with, the head included."""
        return self.layers * (self.attention_params + self.active_mlp_params) + self.vocab * self.hidden


@dataclass(frozen=True, kw_only=True)
class SampleModel:
    """A model known by what one sample (an image, a token) costs: for convolutional and recurrent ones.

    ``flops`` of a forward pass, ``activations`` the elements that its layers write, ``kernels`` of a forward pass.
    """

    name: str
    params: float
    flops: float
    activations: float
    kernels: int
    unit: Literal["image", "token"] = "image"
    kind: Literal["convolution", "planar", "depthwise", "recurrent", "attention"] = "convolution"
    samples_each: float = 1.0


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
        """Whether numbers take four bytes."""
        return self.compute in ("fp32", "tf32")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything a prediction is made from, but the machine. The layout is decided: it has no 0 left to fill in."""

    model: ModelShape | SampleModel
    layout: Layout
    run: Running

    @property
    def shape(self) -> ModelShape:
        """The model, where the formulas of transformers are asked."""
        assert isinstance(self.model, ModelShape)
        return self.model

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
