"""The sections of a config that have forms of their own, but for ``data``, which has a file.

Here, too, is what every section of the schema is made of: its base, and the kinds of values; and what is known before
anything is built: the dimensions of a GPT.

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
from paceline.plan.layout import Compile
from paceline.plan.model_shape import ModelShape

Count: TypeAlias = Annotated[int, Field(ge=1)]
NotNegativeCount: TypeAlias = Annotated[int, Field(ge=0)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Probability: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Factor: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
ImportPath: TypeAlias = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$")]
GPTSize: TypeAlias = Literal[
    "gpt-nano", "gpt-micro", "gpt-mini", "gpt-11m", "gpt-124m", "gpt-350m", "gpt-1.1b", "gpt-3b", "gpt-7b"
]
OnNan: TypeAlias = Literal["skip", "roll_back", "lower_rate", "stop"]
OnSpike: TypeAlias = Literal["ignore", "note", "roll_back", "lower_rate", "stop"]


class Section(BaseModel):
    """Base of every section: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Model(Section):
    kind: str  # first, so that it stands first in a dump; each model narrows it
    compile: bool | Compile = Field(
        default=False,
        description="torch.compile: none, blocks (each one a graph), whole (one graph), or auto (true): whole on one "
        "rank under ddp, else and with fp8 blocks; the loss is compiled too",
    )


class MLPModelConfig(_Model):
    """A classifier of three linear layers."""

    kind: Literal["mlp"] = Field(description="which model")
    input_dim: Count | None = Field(default=None, description="features of a sample; null: from the data")
    hidden_dim: int = Field(default=512, ge=2, description="width of the first hidden layer; the second has half")
    num_classes: Count | None = Field(default=None, description="number of outputs; null: from the data")
    dropout: Probability = Field(default=0.3, description="dropout after each hidden layer")


class ResNetModelConfig(_Model):
    """A residual network for images."""

    kind: Literal["resnet"] = Field(description="which model")
    depth: Literal[18, 50] = Field(default=18, description="number of layers with weights")
    num_classes: Count | None = Field(default=None, description="number of outputs; null: from the data")
    in_channels: Count | None = Field(default=None, description="channels of an image; null: from the data")
    width: Count = Field(default=64, description="channels of the first stage; each stage doubles them")
    norm: Literal["batch", "group"] = Field(
        default="batch", description="batch: statistics of each microbatch; group: none across samples"
    )
    stem: Literal["imagenet", "small"] = Field(
        default="imagenet", description="imagenet: 7x7 stride 2 and pooling; small: 3x3, for images of about 32 pixels"
    )
    channels_last: Literal["auto"] | bool = Field(
        default="auto", description="keep channels next to one another in memory; auto: on CUDA in half precision"
    )


class GPTModelConfig(_Model):
    """A decoder-only transformer: a named size, explicit dimensions, or a size with some of them changed."""

    kind: Literal["gpt"] = Field(description="which model")
    size: GPTSize | None = Field(default=None, description="a named size; null: layers, heads and width are given")
    layers: Count | None = Field(default=None, description="number of blocks; null: from size")
    heads: Count | None = Field(default=None, description="attention heads; null: from size")
    kv_heads: Count | None = Field(default=None, description="heads of keys and values; null: from size, or heads")
    width: Count | None = Field(default=None, description="size of a token's vector; null: from size")
    mlp_width: Count | None = Field(default=None, description="hidden size of a block's MLP; null: from size or width")
    context: Count | None = Field(default=None, description="most tokens of a sample; null: from size, or the data")
    vocab_size: Count | None = Field(default=None, description="number of tokens; null: from the data")
    norm: Literal["rms", "layer"] | None = Field(default=None, description="normalisation; null: from size")
    mlp: Literal["swiglu", "gelu"] | None = Field(default=None, description="form of the MLP; null: from size")
    positions: Literal["rotary", "learned"] | None = Field(default=None, description="positions; null: from size")
    tied: bool | None = Field(default=None, description="output layer shares the embedding; null: from size")
    dropout: Probability | None = Field(default=None, description="dropout in each block; null: from size")


# What a config says of a GPT.
GPT_DIMENSIONS = tuple(
    field.name for field in fields(ModelShape) if field.name in GPTModelConfig.model_fields and field.name != "kind"
)
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


def missing_dimensions(model: GPTModelConfig) -> list[str]:
    """Returns the fields that a GPT without a size lacks."""
    if model.size is not None:
        return []
    return [name for name in ("layers", "heads", "width") if getattr(model, name) is None]


def gpt_shape(model: GPTModelConfig) -> ModelShape | None:
    """Decides every dimension of a GPT but those of its data; None where it has neither a size nor the dimensions."""
    given: dict[str, Any] = {name: value for name in GPT_DIMENSIONS if (value := getattr(model, name)) is not None}
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


def head_problems(*, width: int, heads: int, kv_heads: int, is_rotary: bool) -> Iterator[Problem]:
    """Yields what does not fit: heads and the width, heads of keys and values, pairs of features."""
    # A whole number of features for each head, and of pairs of them where they are turned in pairs.
    unit = heads * (2 if is_rotary else 1)
    lower = width // unit * unit
    widths = f"model.width = {lower} or {lower + unit}" if lower else f"model.width = {unit}"
    if width % heads:
        yield Problem(
            what=f"model.width = {width} is not a multiple of model.heads = {heads}",
            rule="every head has the same whole number of features",
            fix=f"try {widths}",
        )
    elif width % unit:
        yield Problem(
            what=f"model.width / model.heads = {width} / {heads} = {width // heads} is odd",
            rule="model.positions = rotary turns pairs of a head's features",
            fix=f"try {widths}, or model.positions = learned",
        )
    if heads % kv_heads:
        yield Problem(
            what=f"model.heads = {heads} is not a multiple of model.kv_heads = {kv_heads}",
            rule="each head of keys and values serves the same number of heads",
            fix=f"try model.kv_heads = {math.gcd(heads, kv_heads)}",
        )


class FactoryModelConfig(_Model):
    """A model of the user's own code."""

    kind: Literal["factory"] = Field(description="which model")
    factory: ImportPath = Field(description="package.module:function that returns an nn.Module")
    args: dict[str, JsonValue] = Field(default={}, description="keyword arguments of the function")
    channels_last: bool = Field(
        default=False, description="keep channels next to one another in memory: faster convolutions on CUDA"
    )


class LoraConfig(Section):
    """Low-rank adapters: the model is frozen, and thin matrices beside its linear layers learn."""

    rank: NotNegativeCount = Field(
        default=0, description="width of an adapter, such as 8; 0: all parameters are trained"
    )
    alpha: Positive = Field(default=16.0, description="an adapter's output is multiplied by alpha / rank")
    dropout: Probability = Field(default=0.0, description="dropout of what an adapter reads")
    targets: list[str] = Field(
        default=[],
        description="layers, by the last parts of their names, such as q_proj; []: all linear ones but the output",
    )


class HFModelConfig(_Model):
    """A model that transformers builds from a local folder of Hugging Face."""

    kind: Literal["hf"] = Field(description="which model")
    path: str = Field(min_length=1, description="a folder with config.json and, where pretrained, safetensors")
    task: Literal["causal_lm", "sequence_classification", "image_classification"] | None = Field(
        default=None, description="what its head is for; null: the class that config.json names"
    )
    pretrained: bool = Field(default=True, description="begin with the folder's weights; false: with random ones")
    fresh: list[str] = Field(
        default=[],
        description="parameters that the folder lacks and that begin with random values, by patterns such as score or "
        "classifier.*; what the model has no place for is then left out",
    )
    lora: LoraConfig = Field(default=LoraConfig(), description="low-rank adapters, which are trained alone")


ModelConfig: TypeAlias = MLPModelConfig | ResNetModelConfig | GPTModelConfig | FactoryModelConfig | HFModelConfig


class CheckpointConfig(Section):
    """When the run is saved, and how many saves are kept."""

    every_steps: Count | None = Field(default=None, description="steps between checkpoints; null: not by steps")
    every_epochs: Count | None = Field(default=None, description="epochs between checkpoints; null: not by epochs")
    every_minutes: Positive | None = Field(default=None, description="minutes between checkpoints; null: not by time")
    at_end: bool = Field(default=True, description="save when the run ends")
    keep: Count = Field(default=2, description="newest checkpoints that are kept")
    keep_every: Count | None = Field(default=None, description="keep those of every so many steps, too")
    keep_best: NotNegativeCount = Field(default=0, description="keep so many of the best, too, by best_metric")
    best_metric: str = Field(
        default="eval_loss", description="by what: eval_loss, eval_accuracy, eval_perplexity, or eval_NAME of a metric"
    )
    best_mode: Literal["min", "max"] | None = Field(
        default=None, description="whether less or more is better; null: less of a loss or perplexity, else more"
    )
    asynchronous: bool | Literal["auto"] = Field(
        default="auto", description="copy to host memory, and write while training goes on; auto: from 32 MiB a rank on"
    )
    folder: str | None = Field(
        default=None, min_length=1, description="where checkpoints go, shared by all hosts; null: the run's folder"
    )
    verify: Literal["full", "fast", "none"] = Field(
        default="full", description="what is checked before a resume; full: all hashes, fast: sizes"
    )


# A run is started again only while it gets further, and never for an error that came twice at the same step.
class RecoveryConfig(Section):
    """What is done when something goes wrong."""

    max_restarts: NotNegativeCount = Field(default=3, description="times that failed ranks are started again; 0: never")
    max_stalled_restarts: NotNegativeCount = Field(
        default=1, description="restarts in a row that may get no further than the attempts before"
    )
    warm: bool = Field(
        default=True, description="ranks are forked from a process that has torch loaded, where the system can"
    )
    on_nan: OnNan = Field(
        default="skip",
        description="gradients that are not finite; skip: leaves the step out, and stops after train.max_bad_steps in "
        "a row; roll_back, lower_rate: goes back then; stop: at the first",
    )
    on_spike: OnSpike = Field(
        default="ignore",
        description="a loss far above the last ones; note: a record; roll_back: goes on from the last checkpoint "
        "behind the data since; lower_rate: with the same data at a lower rate; stop",
    )
    spike_by: Literal["factor", "deviations"] = Field(
        default="factor", description="factor: over the median of the window; deviations: robust standard deviations"
    )
    spike_threshold: Positive = Field(default=3.0, description="how far above the median a spike begins")
    spike_window: Annotated[int, Field(ge=4)] = Field(default=50, description="steps whose losses are looked at")
    rate_factor: Factor = Field(default=0.5, description="lower_rate: what learning rates are multiplied by")
    max_roll_backs: Count = Field(default=3, description="times that a run goes back; one more stops it")
    on_oom: Literal["stop", "restart", "halve"] = Field(
        default="stop", description="out of memory; halve: starts again with half the microbatch, same global batch"
    )
    on_hang: Literal["restart", "stop"] = Field(default="restart", description="ranks that stopped making progress")
    on_full_disk: Literal["stop", "warn"] = Field(
        default="stop", description="a checkpoint that cannot be written; warn: goes on, and tries at the next one"
    )
    grace_s: Positive = Field(
        default=60.0, description="seconds from the signal of a preemption to the end, saved or not"
    )


class MonitorConfig(Section):
    """What the run writes about itself."""

    folder: str = Field(default="runs", min_length=1, description="run folders are made in here")
    log_every: Count = Field(default=10, description="steps between lines on the console")
    tensorboard: bool = Field(default=True, description="write TensorBoard events, of all ranks and of the host")
    trackers: Annotated[tuple[str, ...], Strict(False)] = Field(
        default=(), description="tensorboard, wandb, mlflow, trackio, or a sink of your own: package.module:name"
    )
    console: bool = Field(default=True, description="print progress")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least level of lines in the logs of ranks"
    )
    sample_s: Positive | None = Field(
        default=1.0,
        description="seconds between measurements of GPUs, processors, memory, network and disks; null: none",
    )
    trace: bool = Field(default=False, description="record every communication")
    histograms: NotNegativeCount | None = Field(
        default=None, description="steps between histograms of all weights and gradients; null or 0: none"
    )
    hang_s: Positive | None = Field(
        default=60.0, description="seconds without progress on any rank until the run is ended with a verdict"
    )
    hang_setup_s: Positive = Field(
        default=600.0, description="the same during set-up, the first step, evaluation and checkpoints"
    )
