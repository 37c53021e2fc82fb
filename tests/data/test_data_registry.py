"""From a config to data sets: every kind of ours, and what a user's factory may return."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from paceline.config.data_sections import (
    DataConfig,
    DigitsDataConfig,
    FactoryDataConfig,
    SyntheticClassificationDataConfig,
    SyntheticImagesDataConfig,
    SyntheticTokensDataConfig,
    TextDataConfig,
)
from paceline.data.datasets import DataShape, TensorPairs
from paceline.data.fetch import fetch_batch
from paceline.data.registry import DataSplits, build_data
from paceline.errors import DataError, UsageError

CONFIGS: list[tuple[DataConfig, DataShape, int]] = [
    (DigitsDataConfig(kind="digits"), DataShape(kind="classes", features=64, classes=10), 1797),
    (
        SyntheticClassificationDataConfig(kind="synthetic_classification", samples=50, features=6, classes=3),
        DataShape(kind="classes", features=6, classes=3),
        50,
    ),
    (
        SyntheticImagesDataConfig(kind="synthetic_images", samples=50, classes=3, channels=2, size=4),
        DataShape(kind="classes", features=32, channels=2, size=4, classes=3),
        50,
    ),
    (
        SyntheticTokensDataConfig(kind="synthetic_tokens", samples=50, vocab_size=9, context=5),
        DataShape(kind="tokens", vocab_size=9, context=5),
        50,
    ),
]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Shaped(TensorDataset):
    shape: Any = DataShape(kind="classes", features=4, classes=2)


def sample_set(length: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(length), torch.arange(length))


def numbers(dataset: Any) -> list[int]:
    return [int(dataset[index][0]) for index in range(len(dataset))]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds data from a factory that returns what it is given."""

    def build(made: Any, **fields: Any) -> DataSplits:
        module = types.ModuleType("a_users_module")
        module.make = lambda: made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "a_users_module", module)
        config = FactoryDataConfig(kind="factory", factory="a_users_module:make", **fields)
        return build_data(config, context=None, seed=0)

    return build


@pytest.mark.parametrize(("config", "shape", "length"), CONFIGS, ids=[config.kind for config, _, _ in CONFIGS])
def test_every_kind_gives_both_parts_and_its_sizes(config: DataConfig, shape: DataShape, length: int) -> None:
    splits = build_data(config, context=None, seed=3)
    assert splits.shape == shape
    assert splits.eval is not None
    assert len(splits.train) + len(splits.eval) == length
    assert len(splits.eval) == round(0.2 * length)
    inputs, targets = splits.train[0]
    if shape.kind == "classes":
        assert inputs.numel() == shape.features
        assert targets.dtype == torch.int64
    else:
        assert inputs.shape == targets.shape == (shape.context,)
    again = build_data(config, context=None, seed=3)
    other = build_data(config, context=None, seed=4)
    assert torch.equal(again.train[0][0], inputs)
    assert not torch.equal(other.train[0][0], inputs)


@pytest.mark.parametrize(("config", "shape", "length"), CONFIGS, ids=[config.kind for config, _, _ in CONFIGS])
def test_a_seed_of_the_data_wins_and_no_evaluation_is_none(config: DataConfig, shape: DataShape, length: int) -> None:
    whole = build_data(config.model_copy(update={"eval_fraction": 0.0}), context=None, seed=0)
    assert whole.eval is None
    assert len(whole.train) == length
    seeded = config.model_copy(update={"seed": 7})
    inputs = build_data(seeded, context=None, seed=0).train[0][0]
    assert torch.equal(inputs, build_data(seeded, context=None, seed=1).train[0][0])
    assert torch.equal(inputs, build_data(config, context=None, seed=7).train[0][0])
    assert replace(shape) == whole.shape


def test_digits_are_standardized_unless_asked_not_to_be() -> None:
    raw = build_data(DigitsDataConfig(kind="digits", standardize=False), context=None, seed=0)
    assert isinstance(raw.train, TensorPairs)
    assert (raw.train.inputs.min().item(), raw.train.inputs.max().item()) == (0, 16)
    scaled = build_data(DigitsDataConfig(kind="digits"), context=None, seed=0)
    assert isinstance(scaled.train, TensorPairs)
    assert abs(scaled.train.inputs.mean()) < 1e-5
    assert isinstance(raw.eval, TensorPairs)
    assert isinstance(scaled.eval, TensorPairs)
    deviation = raw.train.inputs.std(0, correction=0)
    expected = (raw.eval.inputs - raw.train.inputs.mean(0)) / torch.where(deviation == 0, 1.0, deviation)
    torch.testing.assert_close(scaled.eval.inputs, expected, atol=1e-4, rtol=1e-4)  # by the training part's statistics


def test_text_takes_its_context_from_itself_then_from_the_model(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 20, encoding="utf-8")
    config = TextDataConfig(kind="text", path=str(path), context=8)
    splits = build_data(config, context=16, seed=0)
    assert splits.shape == DataShape(kind="tokens", vocab_size=10, context=8)
    assert (len(splits.train), len(splits.eval or [])) == (19, 4)
    from_model = build_data(TextDataConfig(kind="text", path=str(path)), context=16, seed=0)
    assert from_model.shape.context == 16
    as_bytes = build_data(TextDataConfig(kind="text", path=str(path), tokens="bytes"), context=16, seed=0)
    assert as_bytes.shape.vocab_size == 256
    with pytest.raises(DataError, match=r"data\.context is not set"):
        build_data(TextDataConfig(kind="text", path=str(path)), context=None, seed=0)


def test_a_factory_may_return_both_parts(build: Any) -> None:
    train, evaluation = sample_set(6), sample_set(3)
    splits = build((train, evaluation), eval_fraction=0.5)
    assert (splits.train.dataset, splits.eval.dataset) == (train, evaluation)
    assert splits.shape == DataShape(kind="custom")
    assert build((train, None)).eval is None


def test_a_factory_may_return_one_set_which_is_split(build: Any) -> None:
    splits = build(sample_set(10))
    assert sorted(numbers(splits.train) + numbers(splits.eval)) == list(range(10))
    assert len(splits.eval) == 2
    batch = fetch_batch(splits.train, torch.tensor([1, 0]).numpy())
    assert batch[0].tolist() == numbers(splits.train)[1::-1]
    whole = sample_set(10)
    assert build(whole, eval_fraction=0.0).train.dataset is whole
    assert len(build([1, 2, 3]).train) == 2


def test_a_factory_may_say_the_shape(build: Any) -> None:
    assert build(Shaped(torch.zeros(5, 4))).shape == Shaped.shape
    mapped = Shaped(torch.zeros(5, 4))
    mapped.shape = {"kind": "tokens", "vocab_size": 5}
    assert build((mapped, None)).shape == DataShape(kind="tokens", vocab_size=5)
    mapped.shape = {"vocabulary": 5}
    with pytest.raises(DataError, match=r"vocabulary(.|\n)*the fields are kind, features"):
        build((mapped, None))
    mapped.shape = (5, 4)  # as a table has
    assert build((mapped, None)).shape == DataShape(kind="custom")
    ready = DataSplits(train=sample_set(), eval=None, shape=DataShape(kind="custom", features=1))
    found = build(ready)
    assert (found.train.dataset, found.shape) == (ready.train, ready.shape)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "is a NoneType"),
        ({"train": [1]}, "is a dict"),
        ("text", "is a str"),
        ((sample_set(), sample_set(), sample_set()), "a tuple of 3"),
        ((torch.zeros(5, 2), torch.zeros(5)), r"is a Tensor(.|\n)*TensorDataset\(inputs, targets\)"),
        (Stream(), "Stream without access by index"),
        ((sample_set(), Stream()), "the evaluation set of .* is a Stream"),
        ([], "empty training set"),
        (7, "is a int without access by index"),
    ],
)
def test_what_is_no_data_set_is_refused(build: Any, made: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(made)


def test_a_factory_is_called_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_users_module")
    module.make = lambda size, offset=0: [offset + number for number in range(size)]  # type: ignore[attr-defined]

    def fails(size: int) -> None:
        raise ZeroDivisionError(size)

    module.fails = fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_module", module)

    def build(name: str, **args: Any) -> DataSplits:
        config = FactoryDataConfig(kind="factory", factory=f"a_users_module:{name}", args=args, eval_fraction=0.0)
        return build_data(config, context=None, seed=0)

    assert list(build("make", size=3, offset=5).train) == [5, 6, 7]  # type: ignore[call-overload]
    with pytest.raises(DataError, match=r"cannot be called with data.args = {'sise': 3}: .*'size'"):
        build("make", sise=3)
    with pytest.raises(ZeroDivisionError):  # an error inside the user's code stays what it is
        build("fails", size=3)
    with pytest.raises(UsageError, match="a_users_module:missing"):
        build("missing")
