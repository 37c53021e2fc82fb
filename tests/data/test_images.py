"""Images in class folders: decoding, augmentation as a pure function, and files that do not decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.config.data_sections import ImagesDataConfig, may_ignore
from paceline.data.datasets import IGNORED
from paceline.data.fetch import LoaderOptions, fetch_batch
from paceline.data.loader import TrainLoader
from paceline.data.order import DataOrder
from paceline.data.registry import DataSplits, build_data
from paceline.data.rows import ImageFolder
from paceline.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("cats", "dogs")):
        (tmp_path / "in" / name).mkdir(parents=True)
        for each in range(4):
            pixels = np.random.default_rng(each).integers(100 * number, 100 * number + 50, (9, 12, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "in" / name / f"{each}.png")
    return tmp_path / "in"


def build(folder: Path, **keys: Any) -> DataSplits:
    return build_data(ImagesDataConfig(kind="images", path=str(folder), size=6, **keys), None, 0)


def test_folders_are_classes_and_images_are_bytes(folder: Path) -> None:
    splits = build(folder, eval_fraction=0.25)
    assert (splits.shape.classes, splits.shape.channels, splits.shape.size) == (2, 3, 6)
    assert splits.shape.mean is not None
    assert (len(splits.train), splits.eval and len(splits.eval)) == (6, 2)
    images, targets = fetch_batch(splits.train, np.arange(6))
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (6, 3, 6, 6))
    assert torch.equal(images.flatten(1).float().mean(1) > 75, targets == 1)
    both = build(folder, eval_path=str(folder))
    assert both.eval is not None
    assert len(both.eval) == len(both.train) == 8


@pytest.mark.parametrize("augment", ["flip", "crop_flip"])
def test_augmentation_depends_on_seed_epoch_and_index_alone(folder: Path, augment: Any) -> None:
    images = ImageFolder(folder, 6, augment=augment, seed=1)
    whole, _ = images.read(np.arange(8), 3)
    part, _ = images.read(np.array([5, 2]), 3)
    assert torch.equal(part, whole[[5, 2]])
    assert any(not torch.equal(images.read(np.arange(8), epoch)[0], whole) for epoch in (0, 1, 2))
    plain, _ = ImageFolder(folder, 6).read(np.arange(8), 3)
    assert torch.equal(plain, ImageFolder(folder, 6).read(np.arange(8), 4)[0])
    order = DataOrder(length=8, global_batch=8, seed=0, shuffle=False)
    loader = TrainLoader(images, order, options=LoaderOptions(workers=1, worker_start="fork"))
    steps = list(loader.steps(24, num_steps=1))  # epoch 3, by a worker
    assert torch.equal(steps[0].microbatches[0][0], whole)  # type: ignore[index]


def test_an_image_that_does_not_decode_is_told_or_left_out(folder: Path) -> None:
    (folder / "cats" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"cats/1.png \(sample 1\) does not decode"):
        fetch_batch(build(folder, eval_fraction=0.0).train, np.arange(4))
    config = ImagesDataConfig(kind="images", path=str(folder), on_bad="skip")
    assert may_ignore(config)
    splits = build(folder, eval_fraction=0.0, on_bad="skip")
    with pytest.warns(UserWarning, match="it does not count"):
        _, targets = fetch_batch(splits.train, np.arange(4))
    assert targets.tolist() == [0, IGNORED, 0, 0]


def test_an_image_that_is_too_large_is_left_out_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 54)  # twice as many are refused, and these have exactly so many
    Image.new("RGB", (11, 11)).save(folder / "cats" / "1.png")
    splits = build(folder, eval_fraction=0.0, on_bad="skip")
    with pytest.warns(UserWarning, match=r"cats/1.png \(sample 1\) does not decode: Image size .* exceeds limit"):
        _, targets = fetch_batch(splits.train, np.arange(1, 2))
    assert targets.tolist() == [IGNORED]


@pytest.mark.parametrize("has_empty", [False, True])
def test_a_folder_with_one_class_is_refused(folder: Path, has_empty: bool) -> None:
    for each in (folder / "dogs").iterdir():
        each.unlink()
    if not has_empty:
        (folder / "dogs").rmdir()
    with pytest.raises(DataError, match=r"has 1 class\n.*with one, every loss is 0"):
        build(folder)


def test_folders_without_images_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="has no images"):
        build(tmp_path / "missing")
    with pytest.raises(DataError, match=r"has classes \['cats', 'dogs'\], data.eval_path has \['in'\]"):
        build(folder, eval_path=str(tmp_path))
