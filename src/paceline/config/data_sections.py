"""The forms of the section ``data``, and what is known of the data before any of it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue

from paceline.config.sections import Count, ImportPath, NotNegativeCount, Positive, Probability, Section, Seed

Windows: TypeAlias = Literal["random", "fixed"]
_WINDOWS = (
    "where samples begin; random: at places drawn anew each epoch; fixed: one after another, in every epoch the same"
)
OnBad: TypeAlias = Literal["stop", "skip"]
_ON_BAD = "a sample that cannot be read; stop: ends the run; skip: goes on, and it does not count"


class _Reading(Section):
    kind: str  # first, so that it stands first in a dump; each data set narrows it
    shuffle: bool = Field(default=True, description="a new order each epoch, a pure function of seed and epoch")
    last_batch: Literal["keep", "drop"] = Field(default="keep", description="what to do with an epoch's ragged batch")
    workers: Literal["auto"] | NotNegativeCount = Field(
        default="auto",
        description="loader processes of each rank; 0: load in the rank itself; auto: by what reading a batch takes on "
        "CUDA, 0 on CPUs and for data in memory",
    )
    prefetch: Count = Field(
        default=2, description="batches that each worker loads ahead, or the thread that feeds a GPU"
    )
    worker_start: Literal["auto", "fork", "spawn", "forkserver"] = Field(
        default="auto", description="how loader processes start"
    )
    seed: Seed | None = Field(default=None, description="seed of order and split; null: train.seed")


class _Data(_Reading):
    eval_fraction: Probability = Field(default=0.2, description="share of the samples kept for evaluation")


class DigitsDataConfig(_Data):
    """The 1,797 handwritten digits that come with scikit-learn: 8 x 8 pixels, 10 classes."""

    kind: Literal["digits"] = Field(description="which data")
    standardize: bool = Field(default=True, description="give each pixel mean 0 and variance 1 over the training part")


class TextDataConfig(_Data):
    """A text file, or the documentation of Python inside CPython, for language models."""

    kind: Literal["text"] = Field(description="which data")
    path: str | None = Field(default=None, description="a UTF-8 text file; null: the documentation inside Python")
    tokens: Literal["char", "bytes"] | None = Field(
        default=None, description="what a token is; null: that of the tokenizer in model.path, else a character"
    )
    windows: Windows = Field(default="random", description=_WINDOWS)
    context: Count | None = Field(default=None, description="tokens of a sample; null: from the model")


class TokensDataConfig(_Data):
    """Tokens in files that may be larger than memory: prepared folders, nanoGPT's .bin, numpy's .npy."""

    kind: Literal["tokens"] = Field(description="which data")
    path: str = Field(description="a folder of paceline data prepare, a .bin or .npy file, or a pattern of files")
    eval_path: str | None = Field(default=None, description="tokens to evaluate on; null: the last eval_fraction")
    dtype: Literal["uint16", "uint32"] | None = Field(
        default=None,
        description="type of the tokens in .bin files without a manifest; null: uint16, or uint32 where vocab_size is "
        "above 65,536",
    )
    vocab_size: Count | None = Field(default=None, description="number of tokens there are; null: from the manifest")
    windows: Windows = Field(default="random", description=_WINDOWS)
    documents: Literal["joined", "apart"] = Field(
        default="joined",
        description="joined: attention runs from one document into the next; apart: attention and positions begin anew "
        "behind each end token, and what follows it is no target",
    )
    end_token: NotNegativeCount | None = Field(
        default=None, description="documents = apart: the token at the end of each; null: from the manifest"
    )
    context: Count | None = Field(default=None, description="tokens of a sample; null: from the model")
    verify: Literal["full", "fast", "none"] = Field(
        default="fast", description="what is compared with the manifest; fast: sizes, and hashes of younger files"
    )


class ImagesDataConfig(_Data):
    """Images in folders, one folder for each class."""

    kind: Literal["images"] = Field(description="which data")
    path: str = Field(description="a folder with one folder of images for each class")
    eval_path: str | None = Field(default=None, description="such a folder to evaluate on; null: an eval_fraction")
    size: Count | None = Field(
        default=None,
        description="height and width in pixels that images are scaled to; null: what model.path says, else 224",
    )
    augment: Literal["none", "flip", "crop_flip"] = Field(
        default="none", description="of images to train on; crop_flip: a random part, and every second one mirrored"
    )
    on_bad: OnBad = Field(default="stop", description=_ON_BAD)


class RowsDataConfig(_Data):
    """Rows of JSON lines, of parquet, or of a data set that Hugging Face's datasets has saved to disk."""

    kind: Literal["jsonl", "parquet", "hf_dataset"] = Field(description="which data")
    path: str = Field(description="a file, or a folder; of hf_dataset, what save_to_disk of one split has written")
    eval_path: str | None = Field(default=None, description="rows to evaluate on; null: an eval_fraction")
    inputs: str = Field(default="text", description="field of the inputs: numbers; or text, or tokens, without targets")
    targets: str | None = Field(default=None, description="field of the targets; null: the inputs one token later")
    classes: int | None = Field(default=None, ge=2, description="number of classes of the targets; null: from the data")
    tokenizer: str | None = Field(
        default=None, description="bytes, or a folder with a tokenizer, for text; null: the tokenizer in model.path"
    )
    vocab_size: Count | None = Field(default=None, description="number of tokens there are; null: the tokenizer's")
    context: Count | None = Field(default=None, description="tokens of a sample of text; null: from the model")
    on_bad: OnBad = Field(default="stop", description=_ON_BAD)


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
    dtype: Literal["float32", "uint8"] = Field(
        default="float32", description="of a pixel; uint8: a byte, which the device normalises"
    )


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


SourceConfig: TypeAlias = (
    DigitsDataConfig
    | TextDataConfig
    | TokensDataConfig
    | ImagesDataConfig
    | RowsDataConfig
    | SyntheticClassificationDataConfig
    | SyntheticImagesDataConfig
    | SyntheticTokensDataConfig
    | FactoryDataConfig
)


class MixtureDataConfig(_Reading):
    """Several data sets, mixed by weights."""

    kind: Literal["mixture"] = Field(description="which data")
    sources: dict[str, Annotated[SourceConfig, Field(discriminator="kind")]] = Field(
        min_length=1, description="data sets by names of your own, each a section data of any other kind but stream"
    )
    weights: dict[str, Positive] = Field(
        default={}, description="how often samples of a source are drawn, relative to the others', by its name; else 1"
    )
    samples: Count | None = Field(default=None, description="samples of an epoch; null: as many as all sources have")


class StreamDataConfig(_Reading):
    """Samples that come one after another, from the user's own code."""

    kind: Literal["stream"] = Field(description="which data")
    factory: ImportPath = Field(description="package.module:function that returns an iterable of samples")
    args: dict[str, JsonValue] = Field(default={}, description="keyword arguments of the function")
    samples: Count = Field(description="samples that make an epoch; the next one goes on behind them")
    eval_samples: NotNegativeCount = Field(
        default=0, description="how many of the stream's first samples are kept for evaluation"
    )
    on_end: Literal["stop", "repeat"] = Field(
        default="stop", description="where the stream ends before the run; stop: ends the run; repeat: begins it anew"
    )
    shuffle: Literal[False] = Field(default=False, description="a stream is read in its own order")


DataConfig: TypeAlias = SourceConfig | MixtureDataConfig | StreamDataConfig
_DIGIT_PIXELS = 8 * 8
IMAGE_SIZE = 224  # where neither the config nor the model's folder says one


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownShape:
    """The sizes of the data that follow from its config alone; ``None`` where the data must be read."""

    features: int | None = None
    channels: int | None = None
    classes: int | None = None
    vocab_size: int | None = None
    context: int | None = None


def sources_of(data: DataConfig) -> dict[str, SourceConfig | StreamDataConfig]:
    """Returns the sections that say where samples come from, by their keys: those of a mixture, or ``data`` itself."""
    if isinstance(data, MixtureDataConfig):
        return {f"data.sources.{name}": source for name, source in data.sources.items()}
    return {"data": data}


def is_own_code(data: DataConfig) -> bool:
    """Says whether samples come from the user's own code, which may import anything."""
    return any(isinstance(each, FactoryDataConfig | StreamDataConfig) for each in sources_of(data).values())


def may_ignore(data: DataConfig) -> bool:
    """Says whether targets may be such as do not count, so that ranks must count those that do."""
    if isinstance(data, MixtureDataConfig):
        return any(map(may_ignore, data.sources.values()))
    if isinstance(data, ImagesDataConfig):
        return data.on_bad == "skip"
    if isinstance(data, TokensDataConfig):
        return data.documents == "apart"
    return isinstance(data, FactoryDataConfig | StreamDataConfig | RowsDataConfig)


def known_shape(data: DataConfig) -> KnownShape:
    """Returns what is known of the data from its config."""
    if isinstance(data, MixtureDataConfig):
        return _known_together([known_shape(source) for source in data.sources.values()])
    if isinstance(data, DigitsDataConfig):
        return KnownShape(features=_DIGIT_PIXELS, classes=10)
    if isinstance(data, SyntheticClassificationDataConfig):
        return KnownShape(features=data.features, classes=data.classes)
    if isinstance(data, SyntheticImagesDataConfig):
        features = data.channels * data.size**2
        return KnownShape(features=features, channels=data.channels, classes=data.classes)
    if isinstance(data, SyntheticTokensDataConfig):
        return KnownShape(vocab_size=data.vocab_size, context=data.context)
    if isinstance(data, ImagesDataConfig):
        return KnownShape(features=3 * (data.size or IMAGE_SIZE) ** 2, channels=3)
    if isinstance(data, TokensDataConfig | RowsDataConfig):
        return KnownShape(vocab_size=data.vocab_size, context=data.context)
    if isinstance(data, TextDataConfig):
        return KnownShape(vocab_size=256 if data.tokens == "bytes" else None, context=data.context)
    return KnownShape()


def _known_together(shapes: Sequence[KnownShape]) -> KnownShape:
    """Returns what is known of a mixture: what all sources have in common, and the largest vocabulary."""
    found: dict[str, int | None] = {}
    for name in KnownShape.__slots__:
        values = [getattr(shape, name) for shape in shapes]
        found[name] = values[0] if len(set(values)) == 1 else None
        if name in ("classes", "vocab_size") and None not in values:
            found[name] = max(values)
    return KnownShape(**found)
