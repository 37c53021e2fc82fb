"""Feeding: the same batches in the same order, read ahead where nobody can tell; clean ends and errors."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from paceline.data.datasets import InMemoryDataset, Pair, SampleSubset, TensorPairs
from paceline.data.fetch import BatchRequest, DirectSource, FeedSource, LoaderOptions, read_ahead
from paceline.data.loader import EvalLoader, StepBatch, TrainLoader
from paceline.data.order import DataOrder

CPU = torch.device("cpu")
FED = LoaderOptions(device=CPU)
ORDER = DataOrder(length=23, global_batch=7, seed=5)
on_cuda = pytest.param(
    torch.device("cuda", 0),
    id="cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


class Watched(InMemoryDataset):
    """Sample i is the number i; notes which thread reads, and raises at ``broken``."""

    def __init__(self, length: int, broken: int | None = None) -> None:
        self.length = length
        self.broken = broken
        self.readers: list[str] = []

    def __len__(self) -> int:
        return self.length

    def take(self, index: torch.Tensor, *, pinned: bool = False) -> Pair:
        del pinned
        self.readers.append(threading.current_thread().name)
        if self.broken is not None and self.broken in index.tolist():
            raise RuntimeError(f"sample {self.broken} is broken")
        return index.clone(), index.clone()


class Draws:
    """A user's data set, with an augmentation that draws from every random state."""

    def __init__(self) -> None:
        self.readers: list[str] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        self.readers.append(threading.current_thread().name)
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def numbered(length: int) -> TensorPairs:
    return TensorPairs(torch.arange(length), torch.arange(length) * 2)


def plain(step: StepBatch) -> Any:
    """Returns all that a step says, as values that compare."""
    assert step.indices is not None
    values = [None if each is None else [leaf.tolist() for leaf in tree_leaves(each)] for each in step.microbatches]
    return (
        (step.position, step.next_position, step.epoch, step.global_samples),
        (step.local_samples, step.indices.tolist(), values),
    )


def feeding() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paceline-feed"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not feeding()


@pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), on_cuda])
@pytest.mark.parametrize("position", [0, 14, 21])
def test_batches_are_those_of_the_plain_loader(device: torch.device, position: int) -> None:
    for dataset in (numbered(23), TensorDataset(torch.arange(23)), SampleSubset(numbered(40), np.arange(3, 26))):
        for accumulate in (1, 3):
            made = [
                TrainLoader(dataset, ORDER, rank=1, ranks=2, accumulate=accumulate, options=options)
                for options in (LoaderOptions(device=device), None)
            ]
            fed, unfed = ([plain(step) for step in loader.steps(position, 9)] for loader in made)
            assert fed == unfed
            assert len(fed) == 9


def test_a_batch_that_was_read_ahead_is_not_consumed() -> None:
    loader = TrainLoader(numbered(23), ORDER, options=FED)
    with contextlib.closing(loader.steps()) as steps:
        stopped = next(steps)
    assert stopped.next_position == 7
    resumed = next(iter(loader.steps(stopped.next_position, 1)))
    assert plain(resumed) == plain(list(TrainLoader(numbered(23), ORDER).steps(0, 2))[1])


def test_data_in_memory_is_read_by_a_thread_and_a_users_by_the_rank() -> None:
    memory, users = Watched(23), Draws()
    list(TrainLoader(memory, ORDER, options=FED).steps(0, 3))
    list(TrainLoader(users, ORDER, options=FED).steps(0, 3))
    assert set(memory.readers) == {"paceline-feed"}
    assert set(users.readers) == {threading.main_thread().name}


def test_random_states_are_those_of_the_plain_loader_at_every_step() -> None:
    def drawn(options: LoaderOptions | None) -> list[Any]:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        found = []
        with contextlib.closing(TrainLoader(Draws(), ORDER, options=options).steps()) as steps:
            for _ in range(4):
                batch = next(steps).microbatches[0]
                found.append([leaf.tolist() for leaf in batch])
                found.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()))
        return found

    assert drawn(FED) == drawn(None)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), on_cuda])
def test_workers_feed_too(device: torch.device) -> None:
    options = LoaderOptions(device=device, workers=1, worker_start="fork")
    steps = TrainLoader(numbered(23), ORDER, accumulate=2, options=options).steps(7, 4)
    assert [plain(step) for step in steps] == [
        plain(step) for step in TrainLoader(numbered(23), ORDER, accumulate=2).steps(7, 4)
    ]


@pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), on_cuda])
def test_evaluation_is_fed_and_can_be_repeated_and_broken_off(device: torch.device) -> None:
    with closing(EvalLoader(numbered(23), 5, rank=1, ranks=2, options=LoaderOptions(device=device))) as loader:
        expected = [batch[0].tolist() for batch in EvalLoader(numbered(23), 5, rank=1, ranks=2) if batch is not None]
        for _ in range(2):
            assert [batch[0].tolist() for batch in loader if batch is not None] == expected
        assert next(iter(loader))[0].tolist() == expected[0]
        assert [batch[0].tolist() for batch in loader if batch is not None] == expected


def test_an_error_comes_at_its_step_with_the_traceback_of_the_reader() -> None:
    broken = int(ORDER.batch_at(14).indices[2])
    steps = TrainLoader(Watched(23, broken), ORDER, options=FED).steps()
    assert [next(steps).position for _ in range(2)] == [0, 7]
    with pytest.raises(RuntimeError, match=f"sample {broken} is broken") as caught:
        next(steps)
    assert "take" in [frame.name for frame in caught.traceback]
    assert not feeding()


@pytest.mark.parametrize("how", ["close", "drop", "raise"])
def test_the_thread_ends_with_the_iterator(how: str) -> None:
    steps = TrainLoader(numbered(23), ORDER, options=FED).steps()
    next(steps)
    assert len(feeding()) == 1
    if how == "close":
        steps.close()
    elif how == "drop":
        del steps
        gc.collect()
    else:
        with pytest.raises(KeyError), contextlib.closing(steps):
            raise KeyError("a hook")
    assert not feeding()


def test_no_more_is_read_ahead_than_was_asked_for() -> None:
    read: list[int] = []
    is_full = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            if number == 3:
                is_full.set()
            yield number

    ahead = read_ahead(items(), 3)
    assert next(ahead) == 0
    assert is_full.wait(timeout=60)
    ahead.close()
    assert read == [0, 1, 2, 3]


def test_reading_ahead_ends_where_the_items_do() -> None:
    assert list(read_ahead(iter([]), 2)) == []
    assert list(read_ahead(iter(range(7)), 2)) == list(range(7))
    assert list(read_ahead(iter(range(2)), 5)) == [0, 1]


def test_streams_do_not_disturb_one_another_and_close_together() -> None:
    source = FeedSource(DirectSource(Watched(8)), CPU, reads_ahead=True, ahead=2)

    def requests() -> Iterator[BatchRequest]:
        return (BatchRequest(np.array([number]), 0) for number in range(8))

    first, second, third = (source.stream(requests()) for _ in range(3))
    assert next(first)[0].tolist() == next(third)[0].tolist() == [0]
    assert [batch[0].item() for batch in second] == list(range(8))
    assert next(first)[0].tolist() == [1]
    assert len(feeding()) == 2
    source.close()
    assert not feeding()
    assert list(third) == []
    source.close()
