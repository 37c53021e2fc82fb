"""Data sets in memory: digits, synthetic ones, their split, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from paceline.data import datasets
from paceline.data.datasets import (
    SampleSubset,
    TensorPairs,
    check_enough,
    check_map_style,
    split_indices,
    split_pairs,
    synthetic_classification,
    synthetic_images,
    synthetic_tokens,
)
from paceline.errors import DataError

MAKERS: dict[str, Callable[[int], TensorPairs]] = {
    "classification": lambda seed: synthetic_classification(samples=500, features=20, classes=5, seed=seed),
    "images": lambda seed: synthetic_images(samples=500, classes=5, channels=2, size=12, seed=seed),
    "tokens": lambda seed: synthetic_tokens(samples=500, vocab_size=16, context=8, seed=seed),
}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_samples_and_batches_are_rows_of_the_tensors() -> None:
    dataset = TensorPairs(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    inputs, targets = dataset.__getitems__([4, 0, 4])
    assert inputs.tolist() == [[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]
    assert targets.tolist() == [4, 0, 4]
    sample, target = dataset[-1]
    assert sample.tolist() == [10.0, 11.0]
    assert target.item() == 5
    with pytest.raises(IndexError, match="sample 6 of 6"):
        dataset[6]
    assert len(list(iter(dataset))) == 6  # the old protocol of iteration ends at IndexError
    with pytest.raises(DataError, match="6 inputs and 5 targets"):
        TensorPairs(torch.zeros(6), torch.zeros(5))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_synthetic_set_is_a_function_of_its_seed(make: Callable[[int], TensorPairs]) -> None:
    first, again, other = make(3), make(3), make(4)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)
    assert first.inputs.is_contiguous()
    assert first.targets.is_contiguous()


@pytest.mark.parametrize("kind", ["classification", "images"])
def test_classes_can_be_learned_but_not_perfectly(kind: str) -> None:
    """A nearest-centre rule, fitted on one part, is far above chance on the other, and below certainty."""
    made = MAKERS[kind](0)
    train, evaluation = split_pairs(made, 0.4, 0)
    assert evaluation is not None
    inputs = train.inputs.flatten(1)
    centres = torch.stack([inputs[train.targets == each].mean(0) for each in range(5)])
    guesses = torch.cdist(evaluation.inputs.flatten(1), centres).argmin(1)
    accuracy = (guesses == evaluation.targets).double().mean().item()
    assert accuracy > 0.75
    assert set(made.targets.tolist()) == {0, 1, 2, 3, 4}
    assert made.inputs.dtype == torch.float32
    assert made.targets.dtype == torch.int64


def test_classes_of_the_default_size_have_the_stated_floor() -> None:
    made = synthetic_classification(samples=4000, features=784, classes=10, seed=1)
    generator = np.random.default_rng(1)  # the true centres come first from the same generator
    scale = np.float32(datasets._CENTRE_DISTANCE / np.sqrt(2 * 784))
    centres = torch.from_numpy(generator.standard_normal((10, 784), dtype=np.float32) * scale)
    accuracy = (torch.cdist(made.inputs, centres).argmin(1) == made.targets).double().mean().item()
    assert 0.9 < accuracy < 0.99


def test_images_are_told_apart_by_patterns_that_differ() -> None:
    made = synthetic_images(samples=3000, classes=12, channels=3, size=8, seed=0)
    means = torch.stack([made.inputs[made.targets == each].mean(0) for each in range(12)])
    distances = torch.cdist(means.flatten(1), means.flatten(1)) + 100 * torch.eye(12)
    assert made.inputs.shape == (3000, 3, 8, 8)
    assert distances.min() > 2


def test_tokens_follow_a_chain_that_can_be_learned() -> None:
    made = synthetic_tokens(samples=2000, vocab_size=32, context=16, seed=0)
    assert torch.equal(made.inputs[:, 1:], made.targets[:, :-1])
    pairs = torch.stack([made.inputs.flatten(), made.targets.flatten()])
    counts = torch.zeros(32, 32).index_put_((pairs[0], pairs[1]), torch.ones(pairs.shape[1]), accumulate=True)
    frequent = counts.topk(4, dim=1).values.sum(1) / counts.sum(1)
    assert made.inputs.shape == made.targets.shape == (2000, 16)
    # The four successors get 0.9 of the draws and their part of the noise; a uniform chain would give them 4/32.
    assert 0.85 < frequent.mean() < 0.97


def test_tokens_are_those_of_sequences_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_ROWS", 3)
    made, draw = synthetic_tokens(samples=7, vocab_size=11, context=5, seed=3), np.random.default_rng(3)
    successors, token = draw.integers(11, size=(11, 4)), draw.integers(11, size=7)
    choices, is_noise, noise = draw.integers(4, size=(7, 5)), draw.random((7, 5)) < 0.1, draw.integers(11, size=(7, 5))
    for place in range(5):
        assert made.inputs[:, place].tolist() == token.tolist()
        token = np.where(is_noise[:, place], noise[:, place], successors[token, choices[:, place]])
        assert made.targets[:, place].tolist() == token.tolist()
    assert is_noise.any()


def test_digits_are_standardized_by_the_training_part_alone() -> None:
    digits = datasets.load_digits()
    assert digits.inputs.shape == (1797, 64)
    assert set(digits.targets.tolist()) == set(range(10))
    train, evaluation = split_pairs(digits, 0.2, 0)
    assert evaluation is not None
    scaled, scaled_eval = datasets.standardized(train, train), datasets.standardized(evaluation, train)
    varying = train.inputs.std(0) > 0
    assert 0 < int((~varying).sum()) < 10
    torch.testing.assert_close(scaled.inputs.mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.inputs.std(0, correction=0)[varying], torch.ones(int(varying.sum())))
    assert scaled_eval.inputs.mean(0).abs().max() > 1e-3  # not its own statistics
    assert scaled.inputs.isfinite().all()
    assert scaled.inputs.dtype == torch.float32


@settings(deadline=None)
@given(length=st.integers(2, 500), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 2**63 - 1))
def test_a_split_has_every_sample_on_one_side(length: int, fraction: float, seed: int) -> None:
    train, evaluation = split_indices(length, fraction, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, evaluation])), np.arange(length))
    assert len(train) >= 1
    assert len(evaluation) >= 1
    assert abs(len(evaluation) - length * fraction) <= 1
    np.testing.assert_array_equal(train, split_indices(length, fraction, seed)[0])


def test_a_split_follows_its_seed_and_is_not_a_training_order() -> None:
    assert split_indices(100, 0.2, 0)[1].tolist() != split_indices(100, 0.2, 1)[1].tolist()
    assert split_indices(100, 0.0, 0)[1].tolist() == []
    with pytest.raises(DataError, match=r"1 samples and data.eval_fraction = 0.2"):
        split_indices(1, 0.2, 0)
    dataset = MAKERS["tokens"](0)
    assert split_pairs(dataset, 0.0, 0) == (dataset, None)


def test_a_part_shows_some_samples_of_another_set() -> None:
    part = SampleSubset(["a", "b", "c"], np.array([2, 0]))
    assert len(part) == 2
    assert [part[0], part[1]] == ["c", "a"]


def test_map_style_is_required() -> None:
    assert check_map_style([1, 2, 3]) == 3
    assert check_map_style(TensorPairs(torch.zeros(0), torch.zeros(0))) == 0
    with pytest.raises(DataError, match=r"the set is a NoLength without __len__\n  a map-style data set is required"):
        check_map_style(NoLength(), "the set")
    with pytest.raises(DataError, match="Stream without access by index"):
        check_map_style(Stream())
    with pytest.raises(DataError, match="generator without access by index"):
        check_map_style(x for x in range(3))


def test_every_rank_needs_a_sample() -> None:
    check_enough(4, 4)
    with pytest.raises(DataError, match="training set is empty"):
        check_enough(0, 1)
    with pytest.raises(DataError) as raised:
        check_enough(3, 8)
    what, rule, fix = str(raised.value).split("\n")
    assert what == "parallel.ranks = 8 is more than the 3 samples of the training set"
    assert "every rank needs" in rule
    assert "parallel.ranks = 3" in fix
