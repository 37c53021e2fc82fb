"""Loaders: the same samples for any ranks, accumulation and workers; exact evaluation; clean ends and errors."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from paceline.data.datasets import TensorPairs
from paceline.data.fetch import LoaderOptions, WorkerStart
from paceline.data.loader import EvalLoader, StepBatch, TrainLoader, check_picklable
from paceline.data.order import DataOrder
from paceline.errors import DataError, UsageError

# torch warns of more workers than cores, and Python 3.12 of a fork beside threads: neither is what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
]


class Numbers:
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Numbers):
    """Each sample is a draw from every random state."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


class Places(Numbers):
    """Each sample tells which process reads it."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, -1 if info is None else info.id


class UnbuildableError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class Broken(Numbers):
    def __init__(self, length: int, error: Exception) -> None:
        super().__init__(length)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.error
        return index


class Killed(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Unsendable(Numbers):
    def __getitems__(self, indices: list[int]) -> Any:
        return {"function": lambda: indices}


def numbered(length: int) -> TensorPairs:
    return TensorPairs(torch.arange(length), torch.arange(length))


def forked(workers: int, prefetch: int = 2) -> LoaderOptions:
    return LoaderOptions(workers=workers, prefetch=prefetch, worker_start="fork")


def read(step: StepBatch) -> list[list[int]]:
    """Returns the samples of each microbatch, after checking the counts."""
    samples = [
        [] if each is None else (each[0] if isinstance(each, tuple) else each).tolist() for each in step.microbatches
    ]
    assert [len(each) for each in samples] == step.local_samples
    return samples


def read_steps(
    order: DataOrder, ranks: int, accumulate: int, position: int, num_steps: int, options: LoaderOptions | None = None
) -> list[list[int]]:
    """Returns the samples of each step, put together from all ranks as a global batch is."""
    loaders = [
        TrainLoader(numbered(order.length), order, rank=rank, ranks=ranks, accumulate=accumulate, options=options)
        for rank in range(ranks)
    ]
    found = []
    for steps in zip(*(loader.steps(position, num_steps) for loader in loaders), strict=True):
        by_rank = [read(step) for step in steps]
        found.append(
            [i for microbatch in range(accumulate) for rank in range(ranks) for i in by_rank[rank][microbatch]]
        )
        assert {step.global_samples for step in steps} == {len(found[-1])}
        assert {step.next_position - step.position for step in steps} == {len(found[-1])}
    return found


def live_workers() -> int:
    return len(multiprocessing.active_children())


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    assert live_workers() == 0
    yield
    assert live_workers() == 0


orders = st.builds(
    lambda length, batch, seed, drop: DataOrder(
        length=length, global_batch=batch, seed=seed, drop_last=drop and batch <= length
    ),
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(0, 2**63 - 1),
    st.booleans(),
)


@settings(deadline=None)
@given(order=orders, ranks=st.integers(1, 5), accumulate=st.integers(1, 4), position=st.integers(0, 200))
def test_ranks_together_read_the_global_batches(order: DataOrder, ranks: int, accumulate: int, position: int) -> None:
    expected = [batch.indices.tolist() for batch in islice(order.batches(position), 5)]
    assert read_steps(order, ranks, accumulate, position, 5) == expected


@settings(deadline=None)
@given(order=orders, num_steps=st.integers(1, 8), stop=st.integers(0, 8), accumulate=st.integers(1, 3))
def test_a_stopped_run_continues_on_other_ranks(order: DataOrder, num_steps: int, stop: int, accumulate: int) -> None:
    stop = min(stop, num_steps)
    whole = read_steps(order, 2, 1, 0, num_steps)
    resumed = read_steps(order, 3, accumulate, order.position_of_step(stop), num_steps - stop)
    assert whole[stop:] == resumed


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
def test_workers_do_not_change_the_order(workers: int) -> None:
    order = DataOrder(length=23, global_batch=7, seed=5)
    expected = read_steps(order, 2, 2, 7, 9)
    assert read_steps(order, 2, 2, 7, 9, forked(workers, prefetch=1 + workers % 2)) == expected


def test_workers_start_by_spawn() -> None:
    order = DataOrder(length=12, global_batch=4, seed=5)
    expected = read_steps(order, 1, 1, 0, 4)
    assert read_steps(order, 1, 1, 0, 4, LoaderOptions(workers=1, worker_start="spawn")) == expected


def test_a_rank_without_samples_is_told_so() -> None:
    order = DataOrder(length=2, global_batch=8, seed=0)
    for options in (LoaderOptions(), forked(1)):
        steps = list(TrainLoader(numbered(2), order, rank=0, ranks=4, accumulate=1, options=options).steps(0, 2))
        assert [step.microbatches for step in steps] == [[None], [None]]
        assert [step.global_samples for step in steps] == [2, 2]


def test_batches_really_come_from_workers_through_all_epochs() -> None:
    order = DataOrder(length=4, global_batch=1, seed=0)
    steps = TrainLoader(Places(4), order, options=forked(2)).steps()
    places = [batch[1].item() for step in islice(steps, 12) for batch in step.microbatches if batch is not None]
    assert sorted(set(places)) == [0, 1]
    assert live_workers() == 2
    steps.close()
    direct = next(TrainLoader(Places(4), order).steps())
    assert direct.microbatches[0][1].tolist() == [-1]  # type: ignore[index]


def test_steps_without_a_number_go_on_through_epochs() -> None:
    order = DataOrder(length=5, global_batch=2, seed=0)
    epochs = [step.epoch for step in islice(TrainLoader(Numbers(5), order).steps(), 7)]
    assert epochs == [0, 0, 0, 1, 1, 1, 2]


def test_random_states_of_workers_follow_from_the_seed() -> None:
    def draws(seed: int, workers: int, position: int = 0) -> list[list[float]]:
        order = DataOrder(length=12, global_batch=3, seed=seed, shuffle=False)
        steps = TrainLoader(Draws(12), order, options=forked(workers)).steps(position, 6 - position // 3)
        return [[value for column in step.microbatches[0] or () for value in column.tolist()] for step in steps]

    reference = draws(seed=1, workers=1)
    assert draws(seed=1, workers=2) == reference
    assert draws(seed=1, workers=2, position=9) == reference[3:]  # a resumed run draws the same
    assert draws(seed=2, workers=1) != reference
    assert reference[0] != reference[4]  # the same samples, an epoch later


def test_workers_leave_the_ranks_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    order = DataOrder(length=4, global_batch=2, seed=0)
    list(TrainLoader(Draws(4), order, options=forked(1)).steps(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_end_with_the_iterator() -> None:
    order = DataOrder(length=40, global_batch=2, seed=0)
    loader = TrainLoader(Numbers(40), order, options=forked(1))
    assert live_workers() == 0  # none before they are needed
    for ending in ("exhausted", "closed", "dropped"):
        steps = loader.steps(0, 2)
        next(steps)
        assert live_workers() == 1
        if ending == "exhausted":
            assert len(list(steps)) == 1
        elif ending == "closed":
            steps.close()
        else:
            del steps
        assert live_workers() == 0


def test_workers_go_on_when_a_scheduler_signals_all_processes() -> None:
    order = DataOrder(length=40, global_batch=2, seed=0)
    with contextlib.closing(TrainLoader(Numbers(40), order, options=forked(1)).steps(0, 20)) as steps:
        next(steps)
        for each in multiprocessing.active_children():
            os.kill(each.pid or 0, signal.SIGTERM)
        assert len(list(steps)) == 19
    assert live_workers() == 0


def test_workers_end_when_the_loop_raises() -> None:
    order = DataOrder(length=40, global_batch=2, seed=0)

    def loop() -> None:
        with contextlib.closing(TrainLoader(Numbers(40), order, options=forked(1)).steps()) as steps:
            for _ in steps:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:  # keeps the traceback, and so the loop's frame
        loop()
    assert raised.traceback
    assert live_workers() == 0


def test_two_iterators_of_a_loader_do_not_meet() -> None:
    loader = TrainLoader(Numbers(6), DataOrder(length=6, global_batch=2, seed=0), options=forked(1))
    expected = [read(step) for step in loader.steps(0, 3)]
    first, second = loader.steps(0, 3), loader.steps(0, 3)
    assert [(read(a), read(b)) for a, b in zip(first, second, strict=True)] == [(each, each) for each in expected]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_sample_is_named_with_its_cause(workers: int) -> None:
    order = DataOrder(length=6, global_batch=2, seed=0, shuffle=False)
    loader = TrainLoader(Broken(6, ValueError("bad JPEG")), order, options=forked(workers))
    steps = loader.steps()
    assert read(next(steps)) == [[0, 1]]
    with pytest.raises(DataError, match="sample 3 of the data set cannot be read: ValueError: bad JPEG") as raised:
        next(steps)
    cause = raised.value.__cause__
    assert isinstance(cause, ValueError)
    if workers:
        assert "in __getitem__" in "".join(cause.__notes__)  # the worker's own traceback


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    order = DataOrder(length=6, global_batch=6, seed=0)
    with pytest.raises(DataError, match="UnbuildableError: one two") as raised:
        next(TrainLoader(Broken(6, UnbuildableError("one", "two")), order, options=forked(1)).steps())
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert "UnbuildableError: one two" in str(raised.value.__cause__)


def test_a_worker_that_dies_is_reported() -> None:
    order = DataOrder(length=6, global_batch=6, seed=0)
    with pytest.raises(DataError, match=r"a loader worker died: DataLoader worker \(pid") as raised:
        next(TrainLoader(Killed(6), order, options=forked(1)).steps())
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_batch_that_cannot_be_sent_fails_instead_of_hanging() -> None:
    order = DataOrder(length=6, global_batch=6, seed=0)
    with pytest.raises(DataError, match=r"cannot be sent from a loader worker: .*lambda"):
        next(TrainLoader(Unsendable(6), order, options=forked(1)).steps())


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_set_that_cannot_be_pickled_is_refused_before_workers_start(start: WorkerStart) -> None:
    dataset = Numbers(4)
    dataset.transform = lambda sample: sample  # type: ignore[attr-defined]
    order = DataOrder(length=4, global_batch=2, seed=0)
    with pytest.raises(DataError, match=rf'a Numbers, cannot be pickled: (.|\n)*"{start}"(.|\n)*"fork" on Linux'):
        TrainLoader(dataset, order, options=LoaderOptions(workers=1, worker_start=start))
    with pytest.raises(DataError, match="cannot be pickled"):
        EvalLoader(dataset, 2, options=LoaderOptions(workers=1, worker_start=start))
    TrainLoader(dataset, order, options=LoaderOptions(workers=0, worker_start=start))
    TrainLoader(dataset, order, options=forked(1))


def test_picklable_sets_pass_without_a_copy() -> None:
    check_picklable(numbered(4), "spawn")
    huge = torch.empty(1).expand(2**40)  # would not fit in memory if it were written out
    check_picklable(TensorPairs(huge, huge), "spawn")
    check_picklable(lambda: None, "fork")
    with pytest.raises(DataError, match="cannot be pickled"):
        check_picklable(np.array([lambda: None]), "spawn")


@pytest.mark.parametrize("length", [0, 1, 21])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 21, 64])
def test_evaluation_reads_every_sample_once(length: int, ranks: int, batch_size: int) -> None:
    loaders = [EvalLoader(numbered(length), batch_size, rank, ranks) for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])} == {-(-length // batch_size)}
    seen = [
        i
        for number in range(len(loaders[0]))
        for rank in range(ranks)
        if batches[rank][number] is not None
        for i in batches[rank][number][0].tolist()  # type: ignore[index]
    ]
    assert seen == list(range(length))
    counts = [[0 if batch is None else len(batch[0]) for batch in each] for each in batches]
    assert [loader.local_samples() for loader in loaders] == counts


def test_evaluation_keeps_its_workers_until_closed() -> None:
    with closing(EvalLoader(Places(21), 4, options=forked(2))) as loader:
        first = list(loader)
        workers = {child.pid for child in multiprocessing.active_children()}
        assert len(workers) == 2
        again = list(loader)
        assert {child.pid for child in multiprocessing.active_children()} == workers
        for batches in (first, again):
            assert [i for batch in batches if batch is not None for i in batch[0].tolist()] == list(range(21))
        next(iter(loader))  # left half way
        assert [i for batch in loader if batch is not None for i in batch[0].tolist()] == list(range(21))
    assert live_workers() == 0
    assert len(list(loader)) == 6  # starts workers again
    loader.close()
    loader.close()


def test_evaluation_starts_new_workers_after_a_failure() -> None:
    with closing(EvalLoader(Broken(6, ValueError("bad JPEG")), 2, options=forked(1))) as loader:
        for _ in range(2):
            with pytest.raises(DataError, match="sample 3"):
                list(loader)
            assert live_workers() == 0


def test_an_iteration_that_was_overtaken_says_so() -> None:
    with closing(EvalLoader(Numbers(20), 2, options=forked(1))) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        with pytest.raises(UsageError, match="ended by a newer one"):
            next(first)
        loader.close()
        with pytest.raises(UsageError, match=r"or by close\(\)"):
            next(second)


def test_what_breaks_the_contract_is_refused() -> None:
    order = DataOrder(length=4, global_batch=2, seed=0)
    with pytest.raises(UsageError, match="rank = 2 of 2"):
        TrainLoader(Numbers(4), order, rank=2, ranks=2)
    with pytest.raises(UsageError, match="accumulate = 0"):
        TrainLoader(Numbers(4), order, accumulate=0)
    with pytest.raises(UsageError, match="for 4 samples, the training set has 5"):
        TrainLoader(Numbers(5), order)
    with pytest.raises(DataError, match="the training set is a generator"):
        TrainLoader((x for x in range(4)), order)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="batch_size = 0"):
        EvalLoader(Numbers(4), 0)
    with pytest.raises(UsageError, match="rank = -1"):
        EvalLoader(Numbers(4), 1, rank=-1)
    with pytest.raises(UsageError, match="workers = -1"):
        LoaderOptions(workers=-1)
    with pytest.raises(UsageError, match="prefetch = 0"):
        LoaderOptions(prefetch=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_pinned_memory_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match="without a CUDA device"):
        LoaderOptions(pin_memory=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_batches_keep_the_order(workers: int) -> None:
    order = DataOrder(length=23, global_batch=7, seed=5)
    options = LoaderOptions(workers=workers, worker_start="fork", pin_memory=True)
    steps = list(TrainLoader(numbered(23), order, ranks=2, rank=1, options=options).steps(0, 6))
    plain = list(TrainLoader(numbered(23), order, ranks=2, rank=1).steps(0, 6))
    assert [read(step) for step in steps] == [read(step) for step in plain]
    assert all(tensor.is_pinned() for step in steps for batch in step.microbatches for tensor in batch or ())
