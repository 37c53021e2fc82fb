"""A training step as data: the shape of the model, how it is laid out over devices, and how it is run.

Parameters of a transformer with L layers of width h, a of h being queries and g of it keys and values together, MLP
width f in k matrices (3 where it is gated), vocabulary V:

    L (h (2 a + g) + k h f) + V h (twice where the head is not tied)

A mixture of experts has k h f for each expert; a token passes through some of them only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

Framework: TypeAlias = Literal["eager", "compiled", "megatron"]
Sharding: TypeAlias = Literal["none", "ddp", "zero1", "zero2", "fsdp"]
Recompute: TypeAlias = Literal["none", "selective", "attention", "full"]
Compute: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
Scaling: TypeAlias = Literal["", "row", "block"]
Part: TypeAlias = Literal["all", "activations", "states"]


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
        """Keys and values together."""
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
class Layout:
    """How a step is laid out: degrees of parallelism, and what data-parallel ranks share.

    ``is_flat``: parameters are sharded as flat buffers, beside copies in their own shapes.
    """

    devices: int
    data: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1
    sharding: Sharding = "none"
    shard_group: int = 0
    is_flat: bool = False
    sequence_parallel: bool = False
    overlaps_tensor: bool = False

    @property
    def shards(self) -> int:
        """Ranks over which states are cut; 1 where they are not."""
        if self.sharding in ("none", "ddp"):
            return 1
        group = self.data * self.context
        return min(self.shard_group, group) if self.shard_group else group


@dataclass(frozen=True, kw_only=True)
class Running:
    """How each rank runs: batch, precision, what is recomputed, and by what kind of framework.

    ``fused_loss``: where the framework's own loss is not, one that passes over the logits once is used in its place.
    ``split_loss``: tensor-parallel ranks of torch keep their part of the logits, and gather none of them.
    """

    global_batch: float
    micro_batch: float
    seq_len: int
    compute: Compute
    recompute: Recompute = "none"
    framework: Framework = "eager"
    fused_attention: bool = True
    pure: bool = False
    autocast: bool = False
    scaling: Scaling = ""
    fp8_gather: bool = False
    fused_loss: bool = False
    split_loss: bool = False
    part: Part = "all"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything a prediction is made from, but the machine."""

    model: ModelShape | SampleModel
    layout: Layout
    run: Running

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one data-parallel rank."""
        return max(1, round(self.run.global_batch / (self.run.micro_batch * self.layout.data)))
