"""Synthetic sets that are put together when they are asked for, and the small ones that are made whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.config.data_sections import SyntheticImagesDataConfig, SyntheticTokensDataConfig
from paceline.data import datasets, synthetic
from paceline.data.datasets import SampleSubset, TensorPairs
from paceline.data.fetch import fetch_batch, is_in_memory
from paceline.data.registry import build_data
from paceline.data.synthetic import LayeredImages, TokenWindows, make_images, make_tokens

IMAGES = {"samples": 40, "classes": 6, "channels": 3, "size": 8, "seed": 4}
TOKENS = {"samples": 40, "vocab_size": 11, "context": 16, "seed": 4}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every set for one that is too large to be made whole."""
    monkeypatch.setattr(synthetic, "LARGEST_WHOLE_BYTES", 0)
    monkeypatch.setattr(synthetic, "_NUM_TOKENS", 500)


def test_small_sets_are_made_whole_and_as_ever() -> None:
    images, tokens = make_images(**IMAGES), make_tokens(**TOKENS)
    assert isinstance(images, TensorPairs)
    assert isinstance(tokens, TensorPairs)
    assert torch.equal(images.inputs, datasets.synthetic_images(**IMAGES).inputs)
    assert torch.equal(tokens.inputs, datasets.synthetic_tokens(**TOKENS).inputs)


def test_the_limit_counts_what_the_whole_set_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert synthetic.LARGEST_WHOLE_BYTES == 256 * 2**20
    monkeypatch.setattr(synthetic, "LARGEST_WHOLE_BYTES", 10 * 3 * 8 * 8 * 4)
    for samples, kind in ((10, TensorPairs), (11, LayeredImages)):
        assert type(make_images(**{**IMAGES, "samples": samples}, dtype="uint8")) is kind  # bytes count as floats
    monkeypatch.setattr(synthetic, "LARGEST_WHOLE_BYTES", 10 * 17 * 8)
    for samples, tokens_kind in ((10, TensorPairs), (11, TokenWindows)):
        assert type(make_tokens(**{**TOKENS, "samples": samples})) is tokens_kind


def test_classes_without_samples_do_not_change_the_others() -> None:
    many = datasets.synthetic_images(samples=3, classes=1000, channels=1, size=4, seed=2)
    waves = datasets.draw_waves(np.random.default_rng(2), 1000, 1, 4)
    patterns = datasets._patterns(*waves, size=4)
    generator = np.random.default_rng(2)
    datasets.draw_waves(generator, 1000, 1, 4)
    targets = generator.integers(1000, size=3)
    inputs = generator.standard_normal((3, 1, 4, 4), dtype=np.float32)
    assert np.array_equal(many.inputs.numpy(), inputs + patterns[targets])


@pytest.mark.usefixtures("large")
def test_layered_images_are_pattern_and_noise() -> None:
    images = make_images(**IMAGES)
    assert isinstance(images, LayeredImages)
    index = torch.tensor([3, 39, 3])
    inputs, targets = images.take(index)
    assert inputs.shape == (3, 3, 8, 8)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(inputs[0], inputs[2])
    assert torch.equal(images[39][0], inputs[1])
    pattern = inputs[1].permute(1, 2, 0) - images.noises[images.places[39]]
    assert torch.allclose(pattern, images.patterns[targets[1]], atol=1e-6)
    waves = datasets.draw_waves(np.random.default_rng(4), 6, 3, 8)
    whole = torch.from_numpy(datasets._patterns(*waves, size=8))
    assert torch.allclose(images.patterns.permute(0, 3, 1, 2), whole, atol=1e-5)
    assert len({images.places[i].item() for i in range(40)}) > 10


@pytest.mark.usefixtures("large")
def test_bytes_are_the_floats_in_steps_of_a_32nd() -> None:
    as_floats, as_bytes = make_images(**IMAGES), make_images(**IMAGES, dtype="uint8")
    index = torch.arange(40)
    floats, targets = as_floats.take(index)
    bytes_, same_targets = as_bytes.take(index)
    assert bytes_.dtype == torch.uint8
    assert torch.equal(targets, same_targets)
    back = (bytes_.double() - synthetic.PIXEL_MEAN) / synthetic.PIXEL_DEVIATION
    is_inside = floats.abs() < 2.9  # what is cut off lies beyond 3.4, less the pattern
    assert is_inside.float().mean() > 0.98
    assert (back - floats)[is_inside].abs().max() <= 1.01 / synthetic.PIXEL_DEVIATION
    whole = make_images(**{**IMAGES, "samples": 8})
    assert isinstance(whole, LayeredImages)


def test_small_sets_of_bytes_are_rounded_floats() -> None:
    floats, as_bytes = make_images(**IMAGES), make_images(**IMAGES, dtype="uint8")
    assert isinstance(floats, TensorPairs)
    assert isinstance(as_bytes, TensorPairs)
    expected = (floats.inputs * 32 + 128).round().clamp(0, 255)
    assert torch.equal(as_bytes.inputs.float(), expected)


@pytest.mark.usefixtures("large")
def test_windows_are_pieces_of_one_text() -> None:
    tokens = make_tokens(**TOKENS)
    assert isinstance(tokens, TokenWindows)
    inputs, targets = tokens.read(np.arange(40), 0)
    assert inputs.shape == targets.shape == (40, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len(set(tokens.places.tolist())) == 40
    text = tokens.tokens.read(tokens.places[7:8], 16)[0]
    assert torch.equal(tokens[7][0], torch.from_numpy(text))
    again = make_tokens(**TOKENS)
    assert torch.equal(again[7][0], tokens[7][0])


@pytest.mark.usefixtures("large")
def test_a_text_shorter_than_the_samples_is_used_again() -> None:
    tokens = make_tokens(**{**TOKENS, "samples": 5000})
    assert len(tokens) == 5000
    inputs, _ = fetch_batch(tokens, np.arange(5000))
    assert int(inputs.max()) < 11


@pytest.mark.usefixtures("large")
def test_a_config_splits_them_by_number() -> None:
    images = build_data(SyntheticImagesDataConfig(kind="synthetic_images", samples=50, size=8, dtype="uint8"), None, 1)
    assert isinstance(images.train, SampleSubset)
    assert images.eval is not None
    assert (len(images.train), len(images.eval)) == (40, 10)
    assert (images.shape.mean, images.shape.std) == ((128.0,), (32.0,))
    assert is_in_memory(images.train)
    inputs, targets = fetch_batch(images.train, np.arange(4))
    assert inputs.shape == (4, 3, 8, 8)
    assert torch.equal(inputs[2], images.train[2][0])
    config = SyntheticTokensDataConfig(kind="synthetic_tokens", samples=50, context=8, eval_fraction=0.0)
    tokens = build_data(config, None, 1)
    assert isinstance(tokens.train, TokenWindows)
    assert tokens.eval is None
    del targets
