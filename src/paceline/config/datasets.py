"""What a model learns from: the section ``data`` of a config, in one form for each kind of data."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from paceline.config.section import Count, ImportPath, Probability, Section, Seed


class _Data(Section):
    kind: str  # first, so that it stands first in a dump; each data set narrows it
    eval_fraction: Probability = Field(default=0.2, description="share of the samples kept for evaluation")
    shuffle: bool = Field(default=True, description="a new order each epoch, a pure function of seed and epoch")
    last_batch: Literal["keep", "drop"] = Field(default="keep", description="what to do with an epoch's ragged batch")
    workers: int = Field(default=0, ge=0, description="loader processes of each rank; 0: load in the rank itself")
    prefetch: Count = Field(default=2, description="batches that each worker loads ahead")
    worker_start: Literal["auto", "fork", "spawn", "forkserver"] = Field(
        default="auto", description="how loader processes start"
    )
    seed: Seed | None = Field(default=None, description="seed of order and split; null: train.seed")


class DigitsDataConfig(_Data):
    """The 1,797 handwritten digits that come with scikit-learn: 8 x 8 pixels, 10 classes."""

    kind: Literal["digits"] = Field(description="which data")
    standardize: bool = Field(default=True, description="give each pixel mean 0 and variance 1 over the training part")


class TextDataConfig(_Data):
    """A text file, or the documentation of Python inside CPython, for language models."""

    kind: Literal["text"] = Field(description="which data")
    path: str | None = Field(default=None, description="a UTF-8 text file; null: the documentation inside Python")
    tokens: Literal["char", "byte"] = Field(default="char", description="what a token is")
    context: Count | None = Field(default=None, description="tokens of a sample; null: from the model")


class SyntheticClassificationDataConfig(_Data):
    """Random vectors around one centre per class."""

    kind: Literal["synthetic_classification"] = Field(description="which data")
    samples: Count = Field(default=10000, description="number of samples")
    features: Count = Field(default=784, description="numbers in a sample")
    classes: int = Field(default=10, ge=2, description="number of classes")


class SyntheticImagesDataConfig(_Data):
    """Random images with one pattern per class."""

    kind: Literal["synthetic_images"] = Field(description="which data")
    samples: Count = Field(default=1024, description="number of images")
    classes: int = Field(default=10, ge=2, description="number of classes")
    channels: Count = Field(default=3, description="channels of an image")
    size: Count = Field(default=32, description="height and width in pixels")


class SyntheticTokensDataConfig(_Data):
    """Random token sequences that a language model can learn."""

    kind: Literal["synthetic_tokens"] = Field(description="which data")
    samples: Count = Field(default=1024, description="number of sequences")
    vocab_size: int = Field(default=256, ge=2, description="number of tokens")
    context: Count = Field(default=128, description="tokens of a sequence")


class FactoryDataConfig(_Data):
    """Data of the user's own code."""

    kind: Literal["factory"] = Field(description="which data")
    factory: ImportPath = Field(description="package.module:function that returns a Dataset or (train, eval)")
    args: dict[str, JsonValue] = Field(default={}, description="keyword arguments of the function")


DataConfig: TypeAlias = (
    DigitsDataConfig
    | TextDataConfig
    | SyntheticClassificationDataConfig
    | SyntheticImagesDataConfig
    | SyntheticTokensDataConfig
    | FactoryDataConfig
)
