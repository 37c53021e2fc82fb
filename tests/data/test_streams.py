"""Streams: the same samples at any number of ranks and from any position, ends by policy, and what fails in them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import losses_until, save_now
from torch.utils.data import IterableDataset

from paceline.checkpoint.read import open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.config.data_sections import StreamDataConfig
from paceline.data.fetch import LoaderOptions
from paceline.data.loader import EvalLoader, TrainLoader, choose_workers
from paceline.data.order import DataOrder
from paceline.data.registry import DataSplits, build_data
from paceline.errors import BadSampleError, DataError, RankFailedError
from paceline.train.assemble import build_trainer

SHAPE = {"kind": "classes", "features": 2, "classes": 3}


class Numbers(IterableDataset[Any]):
    """Samples whose first feature is their number."""

    shape = SHAPE

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield torch.tensor([float(number), 1.0]), torch.tensor(number % 3)


class Skipping:
    """An iterator that passes over samples without making them."""

    made: int = 0

    def __init__(self, length: int) -> None:
        self.numbers = iter(range(length))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> torch.Tensor:
        number = next(self.numbers)
        type(self).made += 1
        return torch.tensor(number)

    def skip(self, count: int) -> int:
        return len(list(islice(self.numbers, count)))


Build = Callable[..., DataSplits]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Makes a function importable, and returns its path."""

    def register(made: Any) -> str:
        module = types.ModuleType("a_users_stream")
        module.make = made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "a_users_stream", module)
        return "a_users_stream:make"

    return register


@pytest.fixture
def build(factory: Callable[[Any], str]) -> Build:
    def build(made: Any, **fields: Any) -> DataSplits:
        config = StreamDataConfig(kind="stream", factory=factory(made), **fields)
        return build_data(config, context=None, seed=0)

    return build


def read(splits: DataSplits, steps: int, *, rank: int = 0, ranks: int = 1, position: int = 0, **more: Any) -> Any:
    """Returns the numbers of the samples of each step."""
    order = DataOrder(length=len(splits.train), global_batch=6, seed=0, shuffle=False)
    loader = TrainLoader(splits.train, order, rank=rank, ranks=ranks, **more)
    return [
        [int(row) for part in step.microbatches if part is not None for row in part[0][:, 0]]
        for step in loader.steps(position, steps)
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_a_stream_without_duplicates_and_a_resume_goes_on(ranks: int, build: Build) -> None:
    def make() -> DataSplits:
        return build(lambda: Numbers(100), samples=15, eval_samples=4)

    whole = read(make(), 9)  # epochs of 6, 6 and 3 samples
    assert list(chain(*whole)) == list(range(4, 4 + 45))
    for position, step in ((0, 0), (12, 2), (21, 4)):
        apart = [read(make(), 9 - step, rank=rank, ranks=ranks, position=position) for rank in range(ranks)]
        assert [list(chain(*parts)) for parts in zip(*apart, strict=True)] == whole[step:]


def test_accumulation_and_workers_read_the_same(build: Build) -> None:
    splits = build(lambda: Numbers(100), samples=50)
    assert read(splits, 4, accumulate=3) == read(splits, 4)
    options = LoaderOptions(workers=2, worker_start="fork")
    assert read(splits, 4, options=options) == read(splits, 4)
    assert choose_workers(splits.train, 8, cores=8, worker_start="fork").workers == 1


def test_an_iterator_passes_over_samples_without_making_them(build: Build) -> None:
    splits = build(lambda: Skipping(10**5), samples=10**5)
    Skipping.made = 0
    assert splits.train[99_000] == 99_000
    assert Skipping.made == 1


def test_evaluation_reads_the_first_samples_once_each_time(build: Build) -> None:
    splits = build(lambda: Numbers(20), samples=10, eval_samples=7)
    assert splits.eval is not None
    loaders = [EvalLoader(splits.eval, 4, rank=rank, ranks=2) for rank in range(2)]
    for _ in range(2):
        parts = [part for both in zip(*loaders, strict=True) for part in both if part is not None]
        assert torch.cat([part[0][:, 0] for part in parts]).tolist() == list(range(7))


def test_a_stream_that_ends_begins_anew_if_asked(build: Build) -> None:
    def make() -> DataSplits:
        return build(lambda: Numbers(10), samples=100, eval_samples=2, on_end="repeat")

    with pytest.warns(UserWarning, match="ended after 10 samples; it begins anew"):
        whole = read(make(), 5)
    assert list(chain(*whole)) == [2 + number % 8 for number in range(30)]
    with pytest.warns(UserWarning, match="begins anew"):
        assert read(make(), 2, position=18) == whole[3:]


@pytest.mark.parametrize(
    ("made", "fields", "told"),
    [
        (lambda: Numbers(10), {}, "ended after 10 samples, where sample 10 of the run was to follow"),
        (lambda: Skipping(10), {}, "ended after 10 samples, where sample 12 of the run was to follow"),
        (lambda: Numbers(4), {"eval_samples": 4, "on_end": "repeat"}, "after 4 samples, and data.eval_samples = 4"),
        (lambda: iter(()), {"on_end": "repeat"}, "ended after 0 samples"),
        (lambda: (1 / number for number in range(3, -1, -1)), {}, "failed after 3 samples: ZeroDivisionError"),
        (lambda: 3, {}, "returned a int"),
        (lambda: "abc", {}, "returned a str"),
        (lambda missing: missing, {}, "cannot be called with data.args"),
    ],
)
def test_ends_and_failures_are_told_with_the_place(made: Any, fields: Any, told: str, build: Build) -> None:
    def read_all() -> None:
        splits = build(made, samples=100, **fields)
        for number in (0, 4, 8, 12) if "12" in told else range(100):
            assert splits.train[number] is not None

    with pytest.raises(DataError, match=told) as caught:
        read_all()
    is_over = "ended after" in told or "eval_samples" in told  # so that no restart reads it again
    assert isinstance(caught.value, BadSampleError) == is_over


def test_a_skip_that_counts_wrongly_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Skipping, "skip", lambda *_: None)
    with pytest.raises(DataError, match=r"skip\(5\) returned None"):
        build(lambda: Skipping(10), samples=10).train[5]


def make_config(path: str, **data: Any) -> Any:
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 4, "dropout": 0.0},
            "data": {"kind": "stream", "factory": path, "samples": 100, **data},
            "train": {"steps": 6, "global_batch": 4, "dtype": "float64"},
        }
    )


def test_a_checkpoint_keeps_the_position(factory: Callable[[Any], str], tmp_path: Path) -> None:
    config = make_config(factory(lambda: Numbers(100)))
    trainer = build_trainer(config, SoloCommunicator(torch.device("cpu")))
    losses_until(trainer, 3)
    save_now(trainer, tmp_path)
    whole = losses_until(trainer, 6)

    def resume(comm: Communicator) -> list[float]:
        again = build_trainer(config, comm)
        again.load_state(open_checkpoint(tmp_path / "step-00000003"))
        assert again.position == 12
        return losses_until(again, 6)

    apart = run_virtual(resume, 2)  # each rank's own loss, of half of the batch
    assert [sum(losses) / 2 for losses in zip(*apart, strict=True)] == pytest.approx(whole, rel=1e-12)


def test_a_stream_that_ends_on_one_rank_ends_the_run_or_goes_on(factory: Callable[[Any], str]) -> None:
    def train(comm: Communicator) -> int:
        return len(losses_until(build_trainer(config, comm), 6))

    def make() -> Numbers:
        return Numbers(10)

    config = make_config(factory(make))
    with pytest.raises(RankFailedError, match="ended after 10 samples, where sample 10 of the run"):
        run_virtual(train, 2)
    config = make_config(factory(make), on_end="repeat")
    with pytest.warns(UserWarning, match="begins anew"):
        assert run_virtual(train, 2) == [6, 6]
