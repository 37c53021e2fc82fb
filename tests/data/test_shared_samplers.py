"""``shard()`` of what people have: samplers, batch samplers and streams, at any number of ranks, and resumed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline
from paceline.errors import DataError, RankFailedError, UsageError

DATA = TensorDataset(torch.arange(23))
WEIGHTS = [float(number + 1) for number in range(23)]


class Lengths(Sampler[list[int]]):
    """Batches of different sizes, in an order drawn with Python's own random numbers."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3, 4, 5, 6, 7], [8], list(range(9, 23))]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return 4


class Drawn(Sampler[int]):
    """Draws with numpy."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(23).tolist())

    def __len__(self) -> int:
        return 23


LOADERS: dict[str, Any] = {
    "weighted": lambda: DataLoader(DATA, batch_size=6, sampler=WeightedRandomSampler(WEIGHTS, 40)),
    "replaced": lambda: DataLoader(DATA, batch_size=6, sampler=RandomSampler(DATA, replacement=True, num_samples=13)),
    "subset": lambda: DataLoader(DATA, batch_size=6, sampler=SubsetRandomSampler(range(3, 20)), drop_last=True),
    "generator": lambda: DataLoader(
        DATA, batch_size=6, sampler=WeightedRandomSampler(WEIGHTS, 20, generator=torch.Generator().manual_seed(7))
    ),
    "shuffle": lambda: DataLoader(DATA, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "numpy": lambda: DataLoader(DATA, batch_size=6, sampler=Drawn()),
    "batches": lambda: DataLoader(DATA, batch_sampler=Lengths()),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(23), 6, drop_last=False)),
    "subclass": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Drawn(), 5, drop_last=True)),
}
WARNED = "ignore:a batch of an epoch has"


def joined(parts: list[list[list[int]]]) -> list[list[int]]:
    """Joins the batches of ranks, one rank's after the other's."""
    return [[each for piece in pieces for each in piece] for pieces in zip(*parts, strict=True)]


def read(name: str, ranks: int, epochs: int = 2, seed: int = 0) -> list[list[int]]:
    def work(comm: Any) -> list[list[int]]:
        torch.manual_seed(comm.rank)  # whatever ranks have drawn before
        loader = paceline.shard(LOADERS[name](), comm, seed=seed)
        return [batch[0].tolist() for _ in range(epochs) for batch in loader]

    return joined(paceline.run_virtual(work, ranks=ranks))


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("name", LOADERS)
def test_ranks_share_out_what_one_process_has(name: str) -> None:
    alone = read(name, 1)
    for ranks in (2, 3):
        assert read(name, ranks) == alone
    half = len(alone) // 2
    if name != "batch sampler":
        assert alone[:half] != alone[half:]  # another order in another epoch
        assert (read(name, 1, seed=1) == alone) == (name in ("generator", "shuffle"))  # which have seeds of their own


@pytest.mark.parametrize(
    ("batches", "told"), [([[0, 1, 2], [3, 4], [5, 6, 7, 8]], []), ([[0, 1], [2], [3, 4]], ["1 of 2"])]
)
def test_batches_of_their_own_are_warned_of_by_the_shortest(
    batches: list[list[int]], told: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    def work(comm: Any) -> list[int]:
        return [len(batch[0]) for batch in paceline.shard(DataLoader(DATA, batch_sampler=batches), comm)]

    assert [sum(parts) for parts in zip(*paceline.run_virtual(work, ranks=2), strict=True)] == [*map(len, batches)]
    found = [re.search(r"has (\d+ of \d+) samples, for 2 ranks", str(each.message)) for each in recwarn]
    assert {each[1] for each in found if each is not None} == set(told)


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("name", ["generator", "shuffle"])
def test_a_generator_gives_the_order_that_it_gives_in_one_process(name: str) -> None:
    alone = LOADERS[name]()
    assert read(name, 2, epochs=4) == [batch[0].tolist() for _ in range(4) for batch in alone]
    loader = alone.batch_sampler.sampler  # shard() leaves the generator as it was
    before = loader.generator.get_state()
    list(paceline.shard(alone, paceline.connect()))
    assert torch.equal(loader.generator.get_state(), before)


@pytest.mark.filterwarnings(WARNED)
def test_the_samples_are_those_of_the_sampler() -> None:
    weighted = [each for batch in read("weighted", 2) for each in batch]
    assert len(weighted) == 80
    assert sum(each > 11 for each in weighted) > 50  # the heavier half
    subset = read("subset", 1, epochs=1)
    assert [len(batch) for batch in subset] == [6, 6]
    assert {each for batch in subset for each in batch} <= set(range(3, 20))
    batches = read("batches", 2, epochs=1)
    assert sorted(map(len, batches)) == [1, 3, 5, 14]
    assert [len(batch) for batch in read("subclass", 2, epochs=1)] == [5, 5, 5, 5]


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_loop_goes_on_at_another_size_where_it_was(name: str, stop: int) -> None:
    whole = read(name, 1)

    def begin(comm: Any) -> Any:
        loader = paceline.shard(LOADERS[name](), comm)
        for number, _ in enumerate(loader, start=1):
            if number == min(stop, len(loader)):
                return loader.state_dict()
        raise AssertionError

    state = paceline.run_virtual(begin, ranks=2)[0]

    def go_on(comm: Any) -> list[list[int]]:
        loader = paceline.shard(LOADERS[name](), comm)
        loader.load_state_dict(state)
        found = []
        while loader.epoch < 2:
            found += [batch[0].tolist() for batch in loader]
        return found

    assert joined(paceline.run_virtual(go_on, ranks=3)) == whole[min(stop, len(whole) // 2) :]


def test_the_random_numbers_of_the_loop_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(paceline.shard(LOADERS["weighted"](), paceline.connect()))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


class Counting(Sampler[int]):
    """Remembers how often it was asked."""

    def __init__(self, grows: bool = False) -> None:
        self.asked, self.grows, self.epoch = 0, grows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(range(5 + self.epoch)) if self.grows else iter([self.asked, 2])


def test_samplers_that_cannot_be_asked_again_are_refused() -> None:
    comm = paceline.connect()
    with pytest.raises(UsageError, match="it gives two orders"):
        paceline.shard(DataLoader(DATA, batch_size=2, sampler=Counting()), comm)
    loader = paceline.shard(DataLoader(DATA, batch_size=5, sampler=Counting(grows=True)), comm)
    list(loader)
    with pytest.raises(DataError, match="drew 6 samples in epoch 1, and 5 in the first"):
        list(loader)

    def other(comm: Any) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        paceline.shard(DataLoader(DATA, sampler=WeightedRandomSampler(WEIGHTS, 9, generator=generator)), comm)

    with pytest.raises(RankFailedError, match="draws another order"):
        paceline.run_virtual(other, ranks=2)


class Numbers(IterableDataset[tuple[int, float]]):
    """Numbers with a random one each, from another place in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for number in range(23):
            yield number + 100 * self.epoch, random.random() + torch.rand(()).item()


def stream(comm: Any, state: Any = None, stop: int | None = None, **settings: Any) -> Any:
    loader = paceline.shard(DataLoader(Numbers(), batch_size=5, **settings), comm, seed=4)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    while loader.epoch < 2:
        for numbers, drawn in loader:
            torch.rand(comm.rank + 1)  # ranks draw what they like
            found.append([*zip(numbers.tolist(), drawn.tolist(), strict=True)])
            if len(found) == stop:
                return loader.state_dict()
    return found


def test_ranks_share_out_a_stream() -> None:
    alone = paceline.run_virtual(stream, ranks=1)[0]
    assert [len(batch) for batch in alone] == [5, 5, 5, 5, 3] * 2
    assert [number for batch in alone for number, _ in batch] == [*range(23), *range(100, 123)]
    assert len({drawn for batch in alone for _, drawn in batch}) == 46
    for ranks in (2, 4):
        assert joined(paceline.run_virtual(stream, ranks=ranks)) == alone
    whole = paceline.run_virtual(lambda comm: stream(comm, drop_last=True), ranks=2)
    assert [len(batch) for batch in joined(whole)] == [5, 5, 5, 5] * 2


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_a_stream_goes_on_where_it_was(stop: int) -> None:
    alone = paceline.run_virtual(stream, ranks=1)[0]
    state = paceline.run_virtual(lambda comm: stream(comm, stop=stop), ranks=2)[1]
    assert state["position"] == {2: 10, 5: 23, 7: 33}[stop]
    assert joined(paceline.run_virtual(lambda comm: stream(comm, state), ranks=3)) == alone[stop:]


class Unlike(IterableDataset[int]):
    """Gives other samples each time that it is read, or other ones after a while."""

    def __init__(self, marks: Iterator[int], after: int) -> None:
        self.marks, self.after = marks, after

    def __iter__(self) -> Iterator[int]:
        mark = next(self.marks)
        return (number if number < self.after else 1000 * mark + number for number in range(23))


@pytest.mark.parametrize("after", [0, 7, 22])
def test_ranks_that_read_different_samples_of_a_stream_are_refused(after: int) -> None:
    """At the latest behind the last batch of an epoch, on all of them."""
    marks = count(1)

    def work(comm: Any) -> None:
        list(paceline.shard(DataLoader(Unlike(marks, after), batch_size=5), comm))

    with pytest.raises(RankFailedError, match=r"the stream \(Unlike\) gives ranks different samples"):
        paceline.run_virtual(work, ranks=2)


def test_a_stream_that_gives_other_samples_does_not_go_on() -> None:
    loader = paceline.shard(DataLoader(Unlike(count(1), 7), batch_size=5), paceline.connect())
    places = [loader.state_dict() for _ in zip(range(3), loader, strict=False)]
    loader.load_state_dict(places[0])
    next(iter(loader))
    loader.load_state_dict(places[2])
    with pytest.raises(DataError, match="gives other samples before sample 15 of epoch 0"):
        next(iter(loader))
    del places[2]["checksum"]  # as of an older checkpoint
    loader.load_state_dict(places[2])
    next(iter(loader))


def test_what_a_stream_cannot_do_is_told() -> None:
    comm = paceline.connect()
    with pytest.warns(UserWarning, match="num_workers = 2 is not used") as told:
        loader = paceline.shard(DataLoader(Numbers(), batch_size=5, num_workers=2), comm)
    assert told[0].filename == __file__
    assert type(loader.dataset) is Numbers
    with pytest.raises(DataError, match="seed = 9"):
        loader.load_state_dict({"position": 1, "epoch": 0, "place": 1, "seed": 9})
    loader.load_state_dict({"position": 99, "epoch": 0, "place": 99, "seed": 0})
    with pytest.raises(DataError, match="ended before sample 99"):
        next(iter(loader))
    with pytest.raises(UsageError, match="where a stream ends"):
        loader.turn(2)
    batches = paceline.shard(LOADERS["batches"](), comm)
    with pytest.raises(UsageError, match="batch_sampler"):
        batches.turn(2)


def test_a_loop_that_leaves_a_stream_goes_on_with_the_next_pass() -> None:
    loader = paceline.shard(DataLoader(Numbers(), batch_size=5), paceline.connect())
    first = [next(iter(loader))[0].tolist() for _ in range(2)]
    assert first == [[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]]
