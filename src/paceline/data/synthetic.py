"""Synthetic sets that are too large to be made whole: a sample is put together when it is asked for.

    images    pattern of the sample's class + one of 64 noise images
    tokens    a window of one long text of 4 million tokens

Up to 256 MiB, counted as float32 images or int64 tokens, a set is made whole instead (``datasets.py``).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from paceline.data import datasets
from paceline.data.datasets import InMemoryDataset, Pair, TensorPairs, draw_waves, gather
from paceline.data.order import Indices, shuffled_index
from paceline.data.windows import TokenArray, TokenBlocks, Tokens

LARGEST_WHOLE_BYTES = 256 * 2**20
PIXEL_MEAN = 128.0  # of images as bytes: a normal number x becomes 128 + 32 x
PIXEL_DEVIATION = 32.0

_NUM_NOISES = 64
_NUM_TOKENS = 4 * 2**20
_CHUNK = 16  # images that are added up at a time, within a cache
_WINDOW_EPOCH = -2  # epochs count from 0, and -1 is the split: no other order is that of the windows


class LayeredImages(InMemoryDataset):
    """Images that are the sum of a pattern (by class) and a noise (by sample); bytes are added modulo 256."""

    def __init__(
        self, patterns: torch.Tensor, noises: torch.Tensor, targets: torch.Tensor, places: torch.Tensor
    ) -> None:
        self.patterns, self.noises = patterns, noises
        self.targets, self.places = targets, places  # the class of each sample, and its noise

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, index: torch.Tensor, *, pinned: bool = False) -> Pair:
        targets = self.targets.index_select(0, index)
        images = gather(self.noises, self.places.index_select(0, index), pinned=pinned)
        for some, classes in zip(torch.split(images, _CHUNK), torch.split(targets, _CHUNK), strict=True):
            some += self.patterns.index_select(0, classes)
        return images.permute(0, 3, 1, 2), targets


class TokenWindows(TokenBlocks):
    """Windows of a text that begin at given places, the same in every epoch."""

    def __init__(self, tokens: Tokens, places: Indices, context: int) -> None:
        super().__init__(tokens, context)
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def starts(self, indices: Indices, epoch: int) -> Indices:  # noqa: ARG002
        return self.places[indices]


def make_images(
    *, samples: int, classes: int, channels: int, size: int, seed: int, dtype: Literal["float32", "uint8"] = "float32"
) -> TensorPairs | LayeredImages:
    """Makes images of unit noise over a faint wave of the class; as bytes, what lies far out is cut off."""
    sizes = {"samples": samples, "classes": classes, "channels": channels, "size": size}
    if samples * channels * size**2 * 4 > LARGEST_WHOLE_BYTES:
        return _layered(**sizes, seed=seed, is_bytes=dtype == "uint8")
    whole = datasets.synthetic_images(**sizes, seed=seed)
    return TensorPairs(_as_bytes(whole.inputs), whole.targets) if dtype == "uint8" else whole


def make_tokens(*, samples: int, vocab_size: int, context: int, seed: int) -> TensorPairs | TokenWindows:
    if samples * (context + 1) * 8 <= LARGEST_WHOLE_BYTES:
        return datasets.synthetic_tokens(samples=samples, vocab_size=vocab_size, context=context, seed=seed)
    rows = max(2, _NUM_TOKENS // (context + 1))  # at least as many tokens as a window has, and one more
    made = datasets.synthetic_tokens(samples=rows, vocab_size=vocab_size, context=context, seed=seed)
    tokens = torch.cat([made.inputs, made.targets[:, -1:]], dim=1).reshape(-1).numpy()
    num_windows = len(tokens) - context
    places = shuffled_index(np.arange(samples) % num_windows, num_windows, seed, _WINDOW_EPOCH)
    return TokenWindows(TokenArray(tokens), places, context)


def _layered(*, samples: int, classes: int, channels: int, size: int, seed: int, is_bytes: bool) -> LayeredImages:
    generator = np.random.default_rng(seed)
    across, down, phases = (torch.from_numpy(each).float() for each in draw_waves(generator, classes, channels, size))
    targets = torch.from_numpy(generator.integers(classes, size=samples))
    places = torch.from_numpy(generator.integers(_NUM_NOISES, size=samples))
    noises = torch.from_numpy(generator.standard_normal((_NUM_NOISES, size, size, channels), dtype=np.float32))
    patterns = torch.empty((classes, size, size, channels), dtype=torch.uint8 if is_bytes else torch.float32)
    grid = torch.arange(size) * (2 * torch.pi / size)
    for first in range(0, classes, _CHUNK):
        some = slice(first, first + _CHUNK)
        # cos(a + b) = cos a cos b - sin a sin b: a depends on the column, b on the row and the channel.
        columns = (across[some, None] * grid)[:, None, None]
        rows = (down[some, None, None] * grid + phases[some, :, None])[..., None]
        waves = (rows.cos() * columns.cos() - rows.sin() * columns.sin()) * datasets.PATTERN_AMPLITUDE
        if is_bytes:
            waves = (waves * PIXEL_DEVIATION).round_().to(torch.int8).view(torch.uint8)
        patterns[some] = waves.permute(0, 2, 3, 1)
    if is_bytes:  # so far from the ends that no sum leaves them
        noises = _as_bytes(noises, margin=round(PIXEL_DEVIATION * datasets.PATTERN_AMPLITUDE))
    return LayeredImages(patterns, noises, targets, places)


def _as_bytes(images: torch.Tensor, margin: int = 0) -> torch.Tensor:
    return (images * PIXEL_DEVIATION + PIXEL_MEAN).round().clamp(margin, 255 - margin).to(torch.uint8)
