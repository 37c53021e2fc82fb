"""The forms of the section ``data``, and what is known of the data before any of it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, JsonValue

from paceline.config.sections import Count, ImportPath, NotNegativeCount, Positive, Probability, Section, Seed
from paceline.errors import DataError

Windows: TypeAlias = Literal["random", "fixed"]
Packing: TypeAlias = Literal["best_fit", "stream", "none"]
OnBad: TypeAlias = Literal["stop", "skip"]


class _Reading(Section):
    kind: str  # first, so that it stands first in a dump; each data set narrows it
    shuffle: bool = True
    last_batch: Literal["keep", "drop"] = "keep"
    workers: Literal["auto"] | NotNegativeCount = "auto"
    prefetch: Count = 2
    worker_start: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    seed: Seed | None = None


class _Data(_Reading):
    eval_fraction: Probability = 0.2


class DigitsDataConfig(_Data):
    """The 1,797 handwritten digits that come with scikit-learn: 8 x 8 pixels, 10 classes."""

    kind: Literal["digits"]
    standardize: bool = True


class TextDataConfig(_Data):
    """A text file, or the documentation of Python inside CPython, for language models."""

    kind: Literal["text"]
    path: str | None = None
    tokens: Literal["char", "bytes"] | None = None
    windows: Windows = "random"
    context: Count | None = None


class TokensDataConfig(_Data):
    """Tokens in files that may be larger than memory: prepared folders, nanoGPT's .bin, numpy's .npy."""

    kind: Literal["tokens"]
    path: str
    eval_path: str | None = None
    dtype: Literal["uint16", "uint32"] | None = None
    vocab_size: Count | None = None
    windows: Windows = "random"
    packing: Packing = "stream"
    documents: Literal["joined", "apart"] | None = None
    end_token: NotNegativeCount | None = None
    context: Count | None = None
    verify: Literal["full", "fast", "none"] = "fast"


class ImagesDataConfig(_Data):
    """Images in folders, one folder for each class."""

    kind: Literal["images"]
    path: str
    eval_path: str | None = None
    size: Count | None = None
    augment: Literal["none", "flip", "crop_flip"] = "none"
    on_bad: OnBad = "stop"


class RowsDataConfig(_Data):
    """Rows of JSON lines, CSV, parquet, or of a data set that Hugging Face's datasets has saved to disk."""

    kind: Literal["jsonl", "csv", "parquet", "hf_dataset"]
    path: str
    eval_path: str | None = None
    inputs: str = "text"
    text_pair: str | None = None
    targets: str | None = None
    classes: int | None = Field(default=None, ge=2)
    tokenizer: str | None = None
    vocab_size: Count | None = None
    packing: Packing = "none"
    documents: Literal["joined", "apart"] | None = None
    end_token: NotNegativeCount | None = None
    context: Count | None = None
    on_bad: OnBad = "stop"


class SyntheticClassificationDataConfig(_Data):
    """Random vectors around one centre per class."""

    kind: Literal["synthetic_classification"]
    samples: Count = 10000
    features: Count = 784
    classes: int = Field(default=10, ge=2)


class SyntheticImagesDataConfig(_Data):
    """Random images with one pattern per class."""

    kind: Literal["synthetic_images"]
    samples: Count = 1024
    classes: int = Field(default=10, ge=2)
    channels: Count = 3
    size: Count = 32
    dtype: Literal["float32", "uint8"] = "float32"


class SyntheticTokensDataConfig(_Data):
    """Random token sequences that a language model can learn."""

    kind: Literal["synthetic_tokens"]
    samples: Count = 1024
    vocab_size: int = Field(default=256, ge=2)
    context: Count = 128


class FactoryDataConfig(_Data):
    """Data of the user's own code."""

    kind: Literal["factory"]
    factory: ImportPath
    args: dict[str, JsonValue] = Field(default={})


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

    kind: Literal["mixture"]
    sources: dict[str, Annotated[SourceConfig, Field(discriminator="kind")]] = Field(min_length=1)
    weights: dict[str, Positive] = Field(default={})
    samples: Count | None = None


class StreamDataConfig(_Reading):
    """Samples that come one after another, from the user's own code."""

    kind: Literal["stream"]
    factory: ImportPath
    args: dict[str, JsonValue] = Field(default={})
    samples: Count
    eval_samples: NotNegativeCount = 0
    on_end: Literal["stop", "repeat"] = "stop"
    shuffle: Literal[False] = False


DataConfig: TypeAlias = SourceConfig | MixtureDataConfig | StreamDataConfig
_DIGIT_PIXELS = 8 * 8
IMAGE_SIZE = 224  # where neither the config nor the model's folder says one


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """The sizes of a sample: ``None`` where a size has no meaning for this data, or is not known.

    ``classes`` data has inputs of ``features`` numbers (or images of ``channels`` x ``size`` x ``size``) and one class
    as target; ``tokens`` data has ``context`` tokens as inputs and as many as targets; ``custom`` data is anything.
    ``end_token`` ends documents that a model keeps apart; ``pad_token`` stands behind shorter texts, which a model
    leaves out of its attention. ``mean`` and ``std``, in bytes (0 to 255), one for each
    channel or one for all, ask for images of bytes to be normalised.
    """

    kind: Literal["classes", "tokens", "custom"]
    features: int | None = None
    channels: int | None = None
    size: int | None = None
    classes: int | None = None
    class_names: Sequence[str] | None = None
    vocab_size: int | None = None
    context: int | None = None
    end_token: int | None = None
    pad_token: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.mean is None and self.std is None:
            return
        mean, std = _numbers(self.mean), _numbers(self.std)
        counts = {1, self.channels or max(1, len(mean))}
        if len(mean) != len(std) or len(mean) not in counts or not all(each > 0 for each in std):
            what = f"shape.mean = {self.mean}, shape.std = {self.std}, shape.channels = {self.channels}"
            rule = "images of bytes become (x - mean) / std: lists with a mean and a positive deviation for each"
            more = "of ImageNet: mean = [123.675, 116.28, 103.53], std = [58.395, 57.12, 57.375]"
            raise DataError(f"{what}\n  {rule}\n  channel, or with one for all\n  {more}")


def _numbers(values: Any) -> list[float]:
    try:
        return [float(each) for each in values]
    except (TypeError, ValueError):
        return []


def sources_of(data: DataConfig) -> dict[str, SourceConfig | StreamDataConfig]:
    """Returns the sections that say where samples come from, by their keys: those of a mixture, or ``data`` itself."""
    if isinstance(data, MixtureDataConfig):
        return {f"data.sources.{name}": source for name, source in data.sources.items()}
    return {"data": data}


def is_own_code(data: DataConfig) -> bool:
    """Says whether samples come from the user's own code, which may import anything."""
    return any(isinstance(each, FactoryDataConfig | StreamDataConfig) for each in sources_of(data).values())


def are_apart(data: TokensDataConfig | RowsDataConfig) -> bool:
    """Says whether a model keeps the documents of a row apart: those that best fit puts together are strangers."""
    return data.documents == "apart" or data.packing == "best_fit"


def is_packed(data: DataConfig) -> bool:
    """Says whether rows are made of documents by their lengths: not windows of a stream, nor rows of a file as is."""
    return isinstance(data, TokensDataConfig | RowsDataConfig) and data.is_changed("packing")


def may_ignore(data: DataConfig) -> bool:
    """Says whether targets may be such as do not count, so that ranks must count those that do."""
    if isinstance(data, MixtureDataConfig):
        return any(map(may_ignore, data.sources.values()))
    if isinstance(data, ImagesDataConfig):
        return data.on_bad == "skip"
    if isinstance(data, TokensDataConfig):
        return are_apart(data) or is_packed(data)
    return isinstance(data, FactoryDataConfig | StreamDataConfig | RowsDataConfig)


def known_shape(data: DataConfig) -> DataShape:
    if isinstance(data, MixtureDataConfig):  # what all sources have in common, and the largest vocabulary
        shapes = [known_shape(source) for source in data.sources.values()]
        found: dict[str, Any] = {"kind": "custom"}
        for name in (field.name for field in fields(DataShape)):
            values = [getattr(shape, name) for shape in shapes]
            if len(set(values)) == 1:
                found[name] = values[0]
            elif name in ("classes", "vocab_size") and None not in values:
                found[name] = max(values)
        return DataShape(**found)
    if isinstance(data, DigitsDataConfig):
        return DataShape(kind="classes", features=_DIGIT_PIXELS, classes=10)
    if isinstance(data, SyntheticClassificationDataConfig):
        return DataShape(kind="classes", features=data.features, classes=data.classes)
    if isinstance(data, SyntheticImagesDataConfig):
        features = data.channels * data.size**2
        return DataShape(kind="classes", **data.model_dump(include={"channels", "size", "classes"}), features=features)
    if isinstance(data, ImagesDataConfig):
        return DataShape(kind="classes", features=3 * (data.size or IMAGE_SIZE) ** 2, channels=3)
    if isinstance(data, SyntheticTokensDataConfig | TokensDataConfig | RowsDataConfig):
        return DataShape(kind="tokens", vocab_size=data.vocab_size, context=data.context)
    if isinstance(data, TextDataConfig):
        return DataShape(kind="tokens", vocab_size=256 if data.tokens == "bytes" else None, context=data.context)
    return DataShape(kind="custom")
