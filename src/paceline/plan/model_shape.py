"""The shape of a model: what rules, formulas, estimates and the reference GPT are told of it.

Parameters of a transformer with L layers of width h, a of h being queries and g of it keys and values together, MLP
width f in k matrices (3 where it is gated), vocabulary V:

    L (h (2 a + g) + k h f) + V h (twice where the head is not tied)

A mixture of experts has k h f for each expert in the place of an MLP, and h numbers of a router for each; a token
passes through some of the experts only, and through all that are shared. Its first layers may be dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How a token finds its experts, in the words of ``model.router`` in a config."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # the weights of a token's experts add up to 1
    scale: float = 1.0  # of these weights
    groups: int = 1  # of experts, of which a token looks into some
    active_groups: int = 1
    balance: Literal["aux", "bias", "none"] = "aux"
    # Of the auxiliary loss, 0.01 unless given; by bias how far one update moves it, 0.001 unless given.
    balance_weight: float = math.nan
    z_weight: float = 0.0
    capacity: float = 0.0  # of an expert, as a multiple of its fair share; 0: it takes all tokens that come

    def __post_init__(self) -> None:
        if math.isnan(self.balance_weight):
            object.__setattr__(self, "balance_weight", 0.001 if self.balance == "bias" else 0.01)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model by its dimensions, in the words of ``model`` in a config. 0: not known yet, or that of the data.

    Of models that are no transformers, ``kind`` and ``layers`` are known: blocks, or the linear layers of an mlp.
    ``experts`` is 0 for a dense transformer; ``active`` of them take a token, beside the shared ones. ``expert_width``
    is 0 where it is ``mlp_width``, which is that of dense layers. ``head_dim`` is 0 where it is width / heads.
    ``window``: tokens that attention looks back; 0: all. ``score_dim``: where scores and values of a head differ in
    size (latent attention), their mean; else 0. ``total_params``: where layers differ, the count of all.

    Where no dimensions say what a model costs, one sample (an image, a token) does: ``flops`` of a forward pass are
    those of products and convolutions, ``activations`` the numbers that its layers write, ``kernels`` those of a
    forward pass, whatever its samples; a row of a batch counts as ``samples_each``.
    """

    kind: str = "gpt"
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    width: int = 0
    mlp_width: int = 0
    vocab_size: int = 0
    context: int = 0  # tokens of a sample
    norm: str = "rms"
    mlp: str = "swiglu"
    positions: str = "rotary"
    qk_norm: str = "none"  # of queries and keys before they turn: of each head, or of the whole projection
    norm_eps: float = 1e-5
    rotary_base: float = 10_000.0
    tied: bool = False
    dropout: float = 0.0
    causal: bool = True
    window: int = 0
    head_dim: int = 0
    experts: int = 0
    active: int = 0
    shared_experts: int = 0
    expert_width: int = 0
    dense_layers: int = 0  # the first ones, before those with experts
    router: RouterRule = RouterRule()
    total_params: float = 0.0
    score_dim: int = 0
    flops: float = 0.0
    activations: float = 0.0
    kernels: int = 0
    unit: Literal["image", "token"] = "image"
    samples_each: float = 1.0

    @property
    def is_sampled(self) -> bool:
        """Whether it is known by what a sample costs, and not by dimensions."""
        return self.kernels > 0

    @property
    def num_layers(self) -> int:
        """Blocks and both ends: what a pipeline may cut between. An mlp has linear layers alone."""
        return self.layers + 2 if self.layers and self.kind != "mlp" else self.layers

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def score_width(self) -> int:
        """Over all heads: 4 x this x length are the FLOPs of one token's attention."""
        return self.heads * self.score_dim or self.query_width

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Features of keys and values together."""
        return 2 * self.kv_heads * self.head_width

    @property
    def gated(self) -> bool:
        return self.mlp == "swiglu"

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def attention_params(self) -> int:
        return self.width * (2 * self.query_width + self.kv_width)

    @property
    def expert_params(self) -> int:
        """Of one expert, or of the MLP of a layer without."""
        return self.matrices * self.width * self.inner_width

    @property
    def inner_width(self) -> int:
        """Hidden features of one expert, or of the MLP of a layer without."""
        return self.expert_width or self.mlp_width

    @property
    def hidden_width(self) -> float:
        """Hidden features that a token has in the MLPs of a layer, as a mean."""
        sparse = self.sparse_share
        return sparse * (self.active + self.shared_experts) * self.inner_width + (1 - sparse) * self.mlp_width

    @property
    def mlp_params(self) -> float:
        """Of one layer, over all its experts, as a mean; where the count of all is given, what is left of it."""
        if self.total_params and self.experts:
            return (self.total_params - self.end_params) / self.layers - self.attention_params
        return self._mlp_mean(self.experts) + self.router_params

    @property
    def router_params(self) -> float:
        """Of one layer, as a mean: each expert has a row."""
        return self.sparse_share * self.width * self.experts

    @property
    def routed_params(self) -> float:
        """Of one layer, in experts that tokens choose from, as a mean: what expert ranks share. 0 without experts."""
        return self.mlp_params - self._mlp_mean(0) - self.router_params if self.experts else 0.0

    @property
    def other_params(self) -> float:
        """Of one layer, beside the experts that tokens choose from."""
        return self.layer_params - self.routed_params

    @property
    def num_sparse(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def sparse_share(self) -> float:
        return self.num_sparse / max(1, self.layers)

    def _mlp_mean(self, experts: int) -> float:
        """Parameters of the MLPs that some experts and the shared ones are, as a mean over layers."""
        sparse, dense = self.num_sparse, self.layers - self.num_sparse
        counted = sparse * (experts + self.shared_experts) * self.expert_params
        return (counted + dense * self.matrices * self.width * self.mlp_width) / max(1, self.layers)

    @property
    def layer_params(self) -> float:
        """Of one layer, with biases and norms left out, which are less than a thousandth."""
        return self.attention_params + self.mlp_params

    @property
    def end_params(self) -> float:
        return self.vocab_size * self.width * (1 if self.tied else 2)

    @cached_property
    def params(self) -> float:
        if self.total_params or self.is_sampled:
            return self.total_params
        return self.layers * self.layer_params + self.end_params

    @cached_property
    def active_matmul_params(self) -> float:
        """Weights that one token is multiplied with, the head included; as usual, routers are not counted."""
        return self.layers * (self.attention_params + self._mlp_mean(self.active)) + self.vocab_size * self.width
