"""Kept figures of data: which samples come when, of one source and of several, and how readers are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from kept_figures import assert_kept, told
from numpy.typing import NDArray

from paceline.config.data_sections import DataShape
from paceline.data import loader
from paceline.data.datasets import EpochDataset, TensorPairs
from paceline.data.loader import choose_workers
from paceline.data.mixture import Joined, Mixture, common_shape, proportional
from paceline.data.order import ConsumedIds, DataOrder, mix_seed, random_words, share, shuffled_index


def figures() -> dict[str, object]:
    parts = (_of_orders(), _of_mixtures(), _of_shapes(), _of_readers())
    return {name: value for part in parts for name, value in part}


def test_data_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _batch(batch: Any) -> list[Any]:
    return [batch.position, batch.next_position, batch.epoch, batch.indices.tolist()]


def _of_orders() -> Iterator[tuple[str, object]]:
    for length, batch, shuffle, drops in (
        (10, 4, True, False),
        (10, 4, True, True),
        (10, 4, False, True),
        (7, 7, True, False),
        (1, 3, True, False),
        (64, 5, True, False),
    ):
        order: DataOrder = DataOrder(length=length, global_batch=batch, seed=3, shuffle=shuffle, drop_last=drops)
        some = order.batches(3)
        yield (
            f"order of {length} by {batch} {shuffle} {drops}",
            [
                order.samples_per_epoch,
                order.steps_per_epoch,
                [order.position_of_step(step) for step in range(5)],
                [_batch(order.batch_at(position)) for position in (0, 4, 8, 9, 10, 23)],
                [_batch(next(some)) for _ in range(4)],
            ],
        )
    yield (
        "refused",
        [
            told(lambda: DataOrder(length=0, global_batch=1, seed=0)),
            told(lambda: DataOrder(length=1, global_batch=0, seed=0)),
            told(lambda: DataOrder(length=3, global_batch=4, seed=0, drop_last=True)),
            told(lambda: DataOrder(length=3, global_batch=3, seed=0, drop_last=True).steps_per_epoch),
            told(lambda: DataOrder(length=3, global_batch=3, seed=0).batch_at(-1)),
            told(lambda: shuffled_index(np.array([3]), 3, 0, 0).tolist()),
            told(lambda: shuffled_index(np.array([-1]), 3, 0, 0).tolist()),
        ],
    )
    for length in (1, 2, 3, 5, 16, 17, 100):
        yield f"shuffled {length}", [shuffled_index(np.arange(length), length, 7, epoch).tolist() for epoch in (0, 1)]
    yield "words", [str(each) for each in random_words(np.arange(4), 5, 2)]
    yield "seeds", [str(mix_seed(*numbers)) for numbers in ((), (0,), (1,), (1, 2), (2, 1), (-1,), (2**65,))]
    yield "shares", [[share(np.arange(7), part, parts).tolist() for part in range(parts)] for parts in (1, 3, 9)]
    consumed, order = (
        ConsumedIds(DataOrder(length=64, global_batch=4, seed=0)),
        DataOrder(length=64, global_batch=4, seed=0),
    )
    for step in range(70):  # past the number that is folded at once
        batch = order.batch_at(4 * step)
        consumed.note(batch.position, batch.next_position, batch.indices)
    yield "consumed", consumed.state_dict()


class Numbered(EpochDataset):
    """Samples that are ten times their number, and the pass in which they came."""

    reads_ahead = False

    def __init__(self, length: int, first: int) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def read(self, indices: NDArray[np.int64], epoch: int) -> torch.Tensor:
        return torch.from_numpy(self.first + 10 * indices + epoch)


def _of_mixtures() -> Iterator[tuple[str, object]]:
    sources = {"a": Numbered(4, 1000), "b": Numbered(3, 2000), "c": Numbered(1, 3000)}
    joined = Joined(sources)
    yield "joined", [joined.read(np.array([7, 0, 3, 4, 6]), epoch).tolist() for epoch in (0, 1)]
    for shuffle in (True, False):
        for samples in (None, 12):
            mixed = Mixture(sources, {"a": 1.0, "b": 2.0, "c": 0.5}, seed=5, samples=samples, shuffle=shuffle)
            read = [mixed.read(np.arange(len(mixed)), epoch).tolist() for epoch in (0, 1, 2)]
            yield f"mixed {shuffle} {samples}", [len(mixed), mixed.counts, read, mixed.reads_ahead]
    for weights, total in (((1, 1, 1), 10), ((3, 2, 1), 7), ((0.1, 0.1), 3), ((1, 1e-9), 10), ((5,), 1)):
        named = {name: float(weight) for name, weight in zip("abc", weights, strict=False)}
        yield f"proportional {weights} {total}", told(lambda named=named, total=total: proportional(named, total))
    empty = {**sources, "none": Numbered(0, 0)}
    yield "empty", told(lambda: len(Mixture(empty, dict.fromkeys(empty, 1.0), seed=0)))
    pairs = {"a": TensorPairs(torch.zeros(2, 3), torch.zeros(2)), "b": TensorPairs(torch.zeros(2, 4), torch.zeros(2))}
    yield "of other shapes", str(told(lambda: Joined(pairs).read(np.arange(4), 0))).partition("batch:")[0]
    yield "of one", Joined({"a": pairs["a"]}).read(np.array([1]), 0)[0].tolist()


def _of_shapes() -> Iterator[tuple[str, object]]:
    plain = DataShape(kind="classes", features=4, classes=3, class_names=("a", "b", "c"))
    others = {
        "same": {},
        "more classes": {"classes": 5, "class_names": ("a", "b", "c", "d", "e")},
        "other names": {"class_names": ("a", "x", "c")},
        "no names": {"class_names": None},
        "not known": {"classes": None},
        "other features": {"features": 5},
    }
    for name, changes in others.items():
        values: dict[str, Any] = {"kind": "classes", "features": 4, "classes": 3, "class_names": ("a", "b", "c")}
        other = DataShape(**(values | changes))
        for first, second in ((plain, other), (other, plain)):
            found: Any = told(lambda first=first, second=second: common_shape({"one": first, "two": second}))
            known = found if isinstance(found, str) else [found.features, found.classes, list(found.class_names or ())]
            yield f"shape {name} {first is plain}", known


def _of_readers() -> Iterator[tuple[str, object]]:
    """The workers of a rank, by what a sample takes."""
    dataset: Any = Numbered(100, 0)
    in_memory = TensorPairs(torch.zeros(2, 3), torch.zeros(2))
    yield "in memory", list(choose_workers(in_memory, 8, cores=4, worker_start="fork"))
    for seconds, is_on_host in ((1e-6, True), (1e-3, True), (0.5, True), (0.5, False)):
        for cores in (1, 2, 16):
            with patch.object(loader, "_time_sample", lambda _, seconds=seconds, here=is_on_host: (seconds, here)):
                found = choose_workers(dataset, 8, cores=cores, worker_start="fork")
            yield f"workers {seconds} {is_on_host} {cores}", list(found)
    odd: Any = type("Odd", (Numbered,), {"__reduce__": lambda _: (_ for _ in ()).throw(TypeError("no"))})(9, 0)
    yield "not pickled", list(choose_workers(odd, 8, cores=4, worker_start="spawn"))
