"""What is trained: the section ``model`` of a config, in one form for each kind of model."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from paceline.config.section import Count, ImportPath, Probability, Section

GPTSize: TypeAlias = Literal[
    "gpt-nano",
    "gpt-micro",
    "gpt-mini",
    "gpt-11m",
    "gpt-124m",
    "gpt-350m",
    "gpt-1.1b",
    "gpt-3b",
    "gpt-7b",
]


class _Model(Section):
    kind: str  # first, so that it stands first in a dump; each model narrows it
    compile: bool = Field(default=False, description="apply torch.compile to each block")


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


class FactoryModelConfig(_Model):
    """A model of the user's own code."""

    kind: Literal["factory"] = Field(description="which model")
    factory: ImportPath = Field(description="package.module:function that returns an nn.Module")
    args: dict[str, JsonValue] = Field(default={}, description="keyword arguments of the function")


ModelConfig: TypeAlias = MLPModelConfig | ResNetModelConfig | GPTModelConfig | FactoryModelConfig
