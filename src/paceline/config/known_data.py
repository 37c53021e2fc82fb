"""What is known of the data before it is read."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.schema import (
    DataConfig,
    DigitsDataConfig,
    SyntheticClassificationDataConfig,
    SyntheticImagesDataConfig,
    SyntheticTokensDataConfig,
    TextDataConfig,
)

_DIGIT_PIXELS = 8 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownShape:
    """The numbers that a config alone tells about the data; ``None`` where they come with the data."""

    features: int | None = None
    channels: int | None = None
    classes: int | None = None
    vocab_size: int | None = None
    context: int | None = None


def known_shape(data: DataConfig) -> KnownShape:
    """Returns what is known of the data from its config."""
    if isinstance(data, DigitsDataConfig):
        return KnownShape(features=_DIGIT_PIXELS, classes=10)
    if isinstance(data, SyntheticClassificationDataConfig):
        return KnownShape(features=data.features, classes=data.classes)
    if isinstance(data, SyntheticImagesDataConfig):
        features = data.channels * data.size**2
        return KnownShape(features=features, channels=data.channels, classes=data.classes)
    if isinstance(data, SyntheticTokensDataConfig):
        return KnownShape(vocab_size=data.vocab_size, context=data.context)
    if isinstance(data, TextDataConfig):
        return KnownShape(vocab_size=256 if data.tokens == "byte" else None, context=data.context)
    return KnownShape()
