"""Images in folders, one folder for each class: ``path/cat/1.jpg``. Decoded when they are asked for, by workers.

An image becomes bytes (channels, size, size), which the device normalises: its shorter side is scaled to ``size`` and
the middle cut out. ``crop_flip`` takes a random part of 8 to 100 % of the area, and mirrors every second one; what is
drawn is a pure function of (seed, epoch, index).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from paceline.config.data_sections import OnBad
from paceline.data.datasets import EpochDataset, Pair
from paceline.data.order import Indices, random_words
from paceline.errors import BadSampleError, DataError

Augment: TypeAlias = Literal["none", "flip", "crop_flip"]
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, in bytes
IGNORED = -100
_AREAS, _RATIOS, _TRIALS = (0.08, 1.0), (3 / 4, 4 / 3), 10


class ImageFolder(EpochDataset):
    """The images of class folders, by name. ``on_bad`` skip leaves out, of the loss, what does not decode."""

    def __init__(
        self, folder: Path, size: int, *, augment: Augment = "none", on_bad: OnBad = "stop", seed: int = 0
    ) -> None:
        self.classes = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
        self.files: list[Path] = []
        targets: list[int] = []
        for number, name in enumerate(self.classes):
            found = sorted(each for each in (folder / name).rglob("*") if each.suffix.lower() in SUFFIXES)
            self.files += found
            targets += [number] * len(found)
        if not self.files:
            raise DataError(
                f"data.path = {str(folder)!r} has no images\n  it has one folder of images for each class, "
                f"such as cats/1.jpg and dogs/1.jpg; a relative path starts at {Path.cwd()}\n  check the path"
            )
        self.targets = np.array(targets, dtype=np.int64)
        self.size, self.augment, self.on_bad, self.seed = size, augment, on_bad, seed

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Indices, epoch: int) -> Pair:
        images = np.zeros((len(indices), 3, self.size, self.size), dtype=np.uint8)
        targets = torch.from_numpy(self.targets[indices])
        words = random_words(indices, self.seed, epoch)
        for row, (index, word) in enumerate(zip(indices.tolist(), words.tolist(), strict=True)):
            try:
                images[row] = self._decode(self.files[index], word)
            except Exception as error:  # pillow has errors of its own for some, such as images that are too large
                what = f"{self.files[index]} (sample {index}) does not decode: {error}"
                if self.on_bad == "stop":
                    raise BadSampleError(
                        f"{what}\n  every file with the name of an image is one\n"
                        "  mend or remove it, or go on without such ones: data.on_bad = skip"
                    ) from error
                warnings.warn(f"{what}; it does not count", stacklevel=2)
                targets[row] = IGNORED
        return torch.from_numpy(images), targets

    def _decode(self, path: Path, word: int) -> np.ndarray[Any, Any]:
        from PIL import Image

        generator = np.random.default_rng(word)
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = _random_box(generator, *image.size) if self.augment == "crop_flip" else _middle_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image).transpose(2, 0, 1)
        return pixels[:, :, ::-1] if self.augment != "none" and generator.random() < 0.5 else pixels


def _middle_box(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(generator: np.random.Generator, width: int, height: int) -> tuple[float, float, float, float]:
    """Draws a part of an image by area and ratio of its sides (Szegedy et al. 2015); the middle where none fits."""
    for _ in range(_TRIALS):
        area = width * height * generator.uniform(*_AREAS)
        ratio = np.exp(generator.uniform(*np.log(_RATIOS)))
        across, down = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = generator.uniform(0, width - across), generator.uniform(0, height - down)
            return float(left), float(top), float(left + across), float(top + down)
    return _middle_box(width, height)
