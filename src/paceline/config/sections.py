"""The sections of a config that have forms of their own, but for ``data``; and what every section is made of.

Where dimensions of a GPT are changed on top of a size, ``kv_heads`` and ``mlp_width`` keep the size's proportion to
``heads`` and ``width``. Without a size, the model follows the current family: RMS norm, SwiGLU, rotary positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, Strict

from paceline.errors import Problem
from paceline.imports import IMPORT_PATH
from paceline.plan.layout import Compile
from paceline.plan.model_shape import ModelShape, RouterRule

Count: TypeAlias = Annotated[int, Field(ge=1)]
NotNegativeCount: TypeAlias = Annotated[int, Field(ge=0)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Probability: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Factor: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
ImportPath: TypeAlias = Annotated[str, Field(pattern=f"^{IMPORT_PATH.pattern}$")]
GPTSize: TypeAlias = Literal[
    "gpt-nano", "gpt-micro", "gpt-mini", "gpt-11m", "gpt-124m", "gpt-350m", "gpt-1.1b", "gpt-3b", "gpt-7b"
]


class Section(BaseModel):
    """Base of every section: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def is_changed(self, key: str) -> bool:
        """Says whether a key has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


class _Model(Section):
    kind: str  # first, so that it stands first in a dump; each model narrows it
    compile: bool | Compile = False


class MLPModelConfig(_Model):
    """A classifier of three linear layers."""

    kind: Literal["mlp"]
    input_dim: Count | None = None
    hidden_dim: int = Field(default=512, ge=2)
    num_classes: Count | None = None
    dropout: Probability = 0.3


class ResNetModelConfig(_Model):
    """A residual network for images."""

    kind: Literal["resnet"]
    depth: Literal[18, 50] = 18
    num_classes: Count | None = None
    in_channels: Count | None = None
    width: Count = 64
    norm: Literal["batch", "group"] = "batch"
    stem: Literal["imagenet", "small"] = "imagenet"
    channels_last: Literal["auto"] | bool = "auto"


class RouterConfig(Section):
    """How tokens find their experts, and what keeps the experts evenly busy."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: Positive = 1.0
    groups: Count = 1
    active_groups: Count = 1
    balance: Literal["aux", "bias", "none"] = "aux"
    balance_weight: NotNegative | None = None
    z_weight: NotNegative = 0.0
    capacity: NotNegative = 0.0


class GPTModelConfig(_Model):
    """A decoder-only transformer: a named size, explicit dimensions, or a size with some of them changed."""

    kind: Literal["gpt"]
    size: GPTSize | None = None
    layers: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    width: Count | None = None
    mlp_width: Count | None = None
    context: Count | None = None
    vocab_size: Count | None = None
    norm: Literal["rms", "layer"] | None = None
    mlp: Literal["swiglu", "gelu"] | None = None
    positions: Literal["rotary", "learned"] | None = None
    qk_norm: Literal["none", "head", "whole"] | None = None
    norm_eps: Positive | None = None
    rotary_base: Positive | None = None
    tied: bool | None = None
    dropout: Probability | None = None
    experts: Count | None = None
    active: Count | None = None
    shared_experts: NotNegativeCount | None = None
    expert_width: Count | None = None
    dense_layers: NotNegativeCount | None = None
    router: RouterConfig = RouterConfig()


# What a config says of a GPT.
_OF_GPT = GPTModelConfig.model_fields.keys() - {"kind"}
GPT_DIMENSIONS = tuple(field.name for field in fields(ModelShape) if field.name in _OF_GPT)
_PAIRS = "model.positions = rotary turns pairs of a head's features"
_OLD_FAMILY: dict[str, Any] = {"context": 1024, "norm": "layer", "mlp": "gelu", "positions": "learned", "tied": True}

GPT_SIZES: dict[str, ModelShape] = {
    "gpt-nano": ModelShape(layers=4, heads=4, kv_heads=2, width=64, mlp_width=128, context=64, tied=True),
    "gpt-micro": ModelShape(layers=4, heads=4, kv_heads=4, width=128, mlp_width=384, context=128, tied=True),
    "gpt-mini": ModelShape(layers=6, heads=6, kv_heads=6, width=192, mlp_width=512, context=256, tied=True),
    "gpt-11m": ModelShape(layers=6, heads=6, kv_heads=6, width=384, mlp_width=1024, context=256, tied=True),
    "gpt-124m": ModelShape(layers=12, heads=12, kv_heads=12, width=768, mlp_width=4 * 768, **_OLD_FAMILY),
    "gpt-350m": ModelShape(layers=24, heads=16, kv_heads=16, width=1024, mlp_width=4 * 1024, **_OLD_FAMILY),
    "gpt-1.1b": ModelShape(layers=20, heads=16, kv_heads=8, width=2048, mlp_width=5632, context=2048),
    "gpt-3b": ModelShape(layers=28, heads=24, kv_heads=8, width=3072, mlp_width=8192, context=4096),
    "gpt-7b": ModelShape(layers=32, heads=32, kv_heads=32, width=4096, mlp_width=11008, context=4096),
}


def gpt_shape(model: GPTModelConfig) -> ModelShape | None:
    """Decides every dimension of a GPT but those of its data; None where it has neither a size nor the dimensions."""
    given: dict[str, Any] = {name: value for name in GPT_DIMENSIONS if (value := getattr(model, name)) is not None}
    if isinstance(model.router, RouterConfig):
        given["router"] = RouterRule(**model.router.model_dump(exclude_none=True))
    if model.experts is not None:
        given.setdefault("active", min(2, model.experts))
    if model.size is not None:
        base = GPT_SIZES[model.size]
        heads, width = model.heads or base.heads, model.width or base.width
        follows = {"kv_heads": max(1, base.kv_heads * heads // base.heads)}
        follows["mlp_width"] = base.mlp_width * width // base.width
        return replace(base, **(follows | given))
    if model.layers is None or model.heads is None or model.width is None:
        return None
    # Three matrices of 8/3 the width hold as many parameters as two of 4 times; a multiple of 64 suits matrix units.
    mlp_width = 4 * model.width if model.mlp == "gelu" else 64 * math.ceil(8 * model.width / 3 / 64)
    return ModelShape(**({"kv_heads": model.heads, "mlp_width": mlp_width} | given))


def head_problems(shape: ModelShape) -> Iterator[Problem]:
    """Yields what does not fit: heads and the width, heads of keys and values, pairs of features."""
    width, heads, kv_heads = shape.width, shape.heads, shape.kv_heads
    # A whole number of features for each head, and of pairs of them where they are turned in pairs.
    unit = heads * (2 if shape.positions == "rotary" else 1)
    lower = width // unit * unit
    widths = f"model.width = {lower} or {lower + unit}" if lower else f"model.width = {unit}"
    if shape.head_dim:
        if shape.head_dim % (unit // heads):
            what, fix = f"model.head_dim = {shape.head_dim} is odd", f"try model.head_dim = {shape.head_dim + 1}"
            yield Problem(what=what, rule=_PAIRS, fix=f"{fix}, or model.positions = learned")
    elif width % heads:
        what = f"model.width = {width} is not a multiple of model.heads = {heads}"
        yield Problem(what=what, rule="every head has the same whole number of features", fix=f"try {widths}")
    elif width % unit:
        what = f"model.width / model.heads = {width} / {heads} = {width // heads} is odd"
        yield Problem(what=what, rule=_PAIRS, fix=f"try {widths}, or model.positions = learned")
    if shape.positions == "learned" and shape.rotary_base != ModelShape.rotary_base:
        what = f"model.rotary_base = {shape.rotary_base:g} with model.positions = learned"
        fix = "set model.positions = rotary, or leave the base out"
        yield Problem(what=what, rule="learned positions do not turn", fix=fix)
    if heads % kv_heads:
        what = f"model.heads = {heads} is not a multiple of model.kv_heads = {kv_heads}"
        rule = "each head of keys and values serves the same number of heads"
        yield Problem(what=what, rule=rule, fix=f"try model.kv_heads = {math.gcd(heads, kv_heads)}")


class FactoryModelConfig(_Model):
    """A model of the user's own code."""

    kind: Literal["factory"]
    factory: ImportPath
    args: dict[str, JsonValue] = Field(default={})
    channels_last: bool = False


class LoraConfig(Section):
    """Low-rank adapters: the model is frozen, and thin matrices beside its linear layers learn."""

    rank: NotNegativeCount = 0
    alpha: Positive = 16.0
    dropout: Probability = 0.0
    targets: list[str] = Field(default=[])
    path: str | None = Field(default=None, min_length=1)


class HFModelConfig(_Model):
    """A model that transformers builds from a local folder of Hugging Face."""

    kind: Literal["hf"]
    path: str = Field(min_length=1)
    task: Literal["causal_lm", "sequence_classification", "image_classification"] | None = None
    pretrained: bool = True
    fresh: list[str] = Field(default=[])
    lora: LoraConfig = LoraConfig()


ModelConfig: TypeAlias = MLPModelConfig | ResNetModelConfig | GPTModelConfig | FactoryModelConfig | HFModelConfig


class SnapshotConfig(Section):
    """Snapshots in the memory of hosts, from which ranks that are started again go on."""

    every_steps: Count | None = None
    copies: NotNegativeCount = 1


class CheckpointConfig(Section):
    """When the run is saved, and how many saves are kept."""

    every_steps: Count | None = None
    every_epochs: Count | None = None
    every_minutes: Positive | None = None
    at_end: bool = True
    keep: Count = 2
    keep_every: Count | None = None
    keep_best: NotNegativeCount = 0
    best_metric: str = "eval_loss"
    best_mode: Literal["min", "max"] | None = None
    asynchronous: bool | Literal["auto"] = "auto"
    folder: str | None = Field(default=None, min_length=1)
    verify: Literal["full", "fast", "none"] = "full"
    memory: SnapshotConfig = SnapshotConfig()

    @property
    def may_use_background(self) -> bool:
        """Whether saves before the end may be copied to host memory, and written from there while the run trains."""
        return self.asynchronous is not False and any((self.every_steps, self.every_epochs, self.every_minutes))


# A run is started again only while it gets further, and never for an error that came twice at the same step.
class RecoveryConfig(Section):
    """What is done when something goes wrong."""

    max_restarts: NotNegativeCount = 3
    restart_window: Count | None = 100
    max_stalled_restarts: NotNegativeCount = 1
    warm: bool = True
    keep_processes: bool = True
    spares: Annotated[int, Field(ge=0, le=64)] = 0
    on_nan: Literal["skip", "roll_back", "lower_rate", "stop"] = "skip"
    on_spike: Literal["ignore", "note", "roll_back", "lower_rate", "stop"] = "ignore"
    spike_by: Literal["factor", "deviations"] = "factor"
    spike_threshold: Positive = 3.0
    spike_window: Annotated[int, Field(ge=4)] = 50
    rate_factor: Factor = 0.5
    max_roll_backs: Count = 3
    on_oom: Literal["stop", "restart", "halve"] = "stop"
    on_hang: Literal["restart", "stop"] = "restart"
    on_full_disk: Literal["stop", "warn"] = "stop"
    grace_s: Positive = 60.0


class MonitorConfig(Section):
    """What the run writes about itself."""

    folder: str = Field(default="runs", min_length=1)
    log_every: Count = 10
    keep_steps: Annotated[int, Field(ge=64)] | Literal["auto", "all"] = "auto"
    tensorboard: bool = True
    trackers: Annotated[tuple[str, ...], Strict(False)] = ()
    console: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    sample_s: Positive | None = 1.0
    trace: bool = False
    histograms: NotNegativeCount | None = None
    samples: Annotated[int, Field(ge=0, le=12)] = 6
    hang_s: Positive | None = 60.0
    hang_setup_s: Positive = 600.0
