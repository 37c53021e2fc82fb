"""Mixtures: shares by weight, passes over each source, the same samples at any number of ranks, and bad mixtures."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch.utils.data import TensorDataset

from paceline.config import data_sections as sections
from paceline.config.load import load_config
from paceline.data.datasets import MapDataset
from paceline.data.fetch import LoaderOptions, fetch_batch, is_in_memory
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.mixture import Joined, Mixture, proportional
from paceline.data.order import DataOrder
from paceline.data.registry import DataSplits, build_data
from paceline.errors import ConfigError, DataError


def numbered(first: int, length: int) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + length))


def mixed(shuffle: bool = True, **weights: float) -> Mixture:
    sources: dict[str, MapDataset] = {"a": numbered(0, 10), "b": numbered(100, 40)}  # type: ignore[dict-item]
    return Mixture(sources, {"a": 1.0, "b": 1.0, **weights}, seed=3, shuffle=shuffle)


def read_epoch(mixture: Joined, epoch: int) -> list[int]:
    (values,) = fetch_batch(mixture, np.arange(len(mixture)), epoch)
    numbers: list[int] = values.tolist()
    return numbers


def make(text: dict[str, Any], context: int | None = 4) -> DataSplits:
    config: sections.DataConfig = TypeAdapter(sections.DataConfig).validate_python(text)
    return build_data(config, context, seed=0)


def test_weights_are_the_shares_of_each_epoch() -> None:
    mixture = mixed(a=3.0, b=2.0)
    for epoch in range(3):
        numbers = read_epoch(mixture, epoch)
        assert len(numbers) == 50
        assert sum(number < 100 for number in numbers) == 30


def test_no_sample_comes_again_before_all_of_its_source_came() -> None:
    mixture = mixed(a=3.0, b=2.0)
    seen = Counter(number for epoch in range(2) for number in read_epoch(mixture, epoch))
    assert [seen[number] for number in range(10)] == [6] * 10  # 2 x 30 samples in passes of 10
    assert [seen[number] for number in range(100, 140)] == [1] * 40  # 2 x 20 in one pass of 40
    assert read_epoch(mixture, 0) != read_epoch(mixture, 1)
    assert read_epoch(mixture, 1) == read_epoch(mixed(a=3.0, b=2.0), 1)


@given(st.lists(st.floats(min_value=0.1, max_value=10), min_size=1, max_size=5), st.integers(500, 10**6))
def test_shares_add_up_and_are_nearest(weights: list[float], total: int) -> None:
    counts = proportional({str(number): weight for number, weight in enumerate(weights)}, total)
    exact = [weight / sum(weights) * total for weight in weights]
    assert sum(counts) == total
    assert all(abs(count - share) < 1 + 1e-6 for count, share in zip(counts, exact, strict=True))


def test_a_weight_that_gives_no_sample_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.weights.few = 0.01 gives no sample in an epoch of 10"):
        proportional({"few": 0.01, "many": 1.0}, 10)


def test_without_shuffling_sources_are_read_in_their_order() -> None:
    assert read_epoch(mixed(shuffle=False), 1)[:25] == [(25 + number) % 10 for number in range(25)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_and_a_resume_read_the_samples_of_one_process(ranks: int) -> None:
    order = DataOrder(length=50, global_batch=8, seed=1)

    def read(rank: int, ranks: int, position: int, steps: int) -> list[list[int]]:
        loader = TrainLoader(mixed(b=3.0), order, rank=rank, ranks=ranks)
        parts = [step.microbatches[0] for step in loader.steps(position, steps)]
        return [[] if part is None else part[0].tolist() for part in parts]

    whole = read(0, 1, 0, 16)
    apart = [read(rank, ranks, order.position_of_step(5), 11) for rank in range(ranks)]
    assert [list(chain(*parts)) for parts in zip(*apart, strict=True)] == whole[5:]


def test_workers_read_the_same_samples() -> None:
    order = DataOrder(length=50, global_batch=25, seed=1)
    options = LoaderOptions(workers=1, worker_start="fork")
    found = [
        [step.microbatches[0][0].tolist() for step in TrainLoader(mixed(), order, options=each).steps(0, 3)]
        for each in (LoaderOptions(), options)
    ]
    assert found[0] == found[1]


def test_evaluation_reads_each_sample_of_each_source_once() -> None:
    splits = make(
        {
            "kind": "mixture",
            "sources": {
                "few": {"kind": "synthetic_tokens", "samples": 10, "context": 4, "vocab_size": 9, "eval_fraction": 0.5},
                "many": {"kind": "synthetic_tokens", "samples": 40, "context": 4, "vocab_size": 30},
            },
            "weights": {"few": 9},
        }
    )
    assert splits.shape.vocab_size == 30
    assert is_in_memory(splits.train)
    assert splits.eval is not None
    assert len(splits.eval) == 5 + 8
    loaders = [EvalLoader(splits.eval, 4, rank=rank, ranks=2) for rank in range(2)]
    rows = [part[0] for parts in zip(*loaders, strict=True) for part in parts if part is not None]
    assert torch.equal(torch.cat(rows), fetch_batch(splits.eval, np.arange(13))[0])


def test_samples_of_different_forms_are_refused_with_the_sources(tmp_path: Path) -> None:
    for name, text in (("one", "abcd" * 20), ("two", "bcde" * 20)):
        (tmp_path / name).write_text(text)
    texts = {name: {"kind": "text", "path": str(tmp_path / name)} for name in ("one", "two")}
    with pytest.raises(DataError, match=r"data.sources.one and data.sources.two have different tokenizers"):
        make({"kind": "mixture", "sources": texts})
    tokens = {str(size): {"kind": "synthetic_tokens", "samples": 9, "context": size} for size in (4, 5)}
    with pytest.raises(DataError, match=r"data.sources.4 has context = 4, data.sources.5 has 5"):
        make({"kind": "mixture", "sources": tokens})
    wide: dict[str, Any] = {"a": numbered(0, 4), "b": TensorDataset(torch.zeros(4, 2, dtype=torch.int64))}
    with pytest.raises(DataError, match=r"a \(pass 0\), b \(pass 0\) cannot stand in one batch"):
        read_epoch(Joined(wide), 0)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("sources: {a: {kind: tokens, pth: x}}", "data.sources.a.pth is not a known key"),
        ("sources: {a: {kind: token}}", "data.sources.a.kind = 'token' is not a kind of data"),
        ("sources: {a: 3}", "data.sources.a = 3 is not a section"),
        ("sources: {a: {kind: digits}}", "model.kind = gpt cannot read data.sources.a.kind = digits"),
        ("sources: {a: {kind: text, workers: 2}}", "data.sources.a.workers = 2 has no effect"),
        ("sources: {web: {kind: text}}, weights: {wep: 2}", "did you mean data.weights.web?"),
        ("sources: {web: {kind: text}}, weights: {web: 0}", "data.weights.web = 0 "),
    ],
)
def test_a_bad_mixture_is_told_by_the_name_of_its_source(section: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = "name: a\nmodel: {kind: gpt, size: gpt-micro}\ntrain: {steps: 1}\n"
    path.write_text(f"{text}data: {{kind: mixture, {section}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert told in str(caught.value)
