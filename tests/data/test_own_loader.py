"""Own data in an own loop: the same batches at any number of ranks, ragged ends, and resume."""

from __future__ import annotations

from collections import UserDict
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline.comm.objects import mean
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.data.own_loader import OwnLoader, loader, shard
from paceline.data.own_stream import without_rows
from paceline.engines.apply import parallelize
from paceline.errors import DataError, UsageError

CPU = torch.device("cpu")


class Numbers:
    """Samples that are their own numbers."""

    def __init__(self, length: int = 22) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def read(ranks: int, epochs: int = 2, state: dict[str, int] | None = None, **options: Any) -> list[list[int]]:
    """Returns the samples of each batch over all ranks, in order."""

    def work(comm: Any) -> list[list[int]]:
        mine = loader(Numbers(), comm, **{"batch_size": 8, **options})
        if state is not None:
            mine.load_state_dict(state)
        found = [batch for _ in range(mine.epoch, epochs) for batch in mine]
        return [batch.tolist() for batch in found]

    return [list(chain(*shares)) for shares in zip(*run_virtual(work, ranks=ranks), strict=True)]


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}, {"seed": 5}])
def test_batches_are_those_of_one_process_at_any_number_of_ranks(options: dict[str, Any]) -> None:
    one = read(1, **options)
    assert read(2, **options) == read(3, **options) == one
    sizes = [8, 8] if "drop_last" in options else [8, 8, 6]
    assert [len(batch) for batch in one] == sizes * 2
    first = sorted(chain(*one[: len(sizes)]))
    assert len(set(first)) == len(first)
    if "drop_last" not in options:
        assert first == list(range(22))
    assert (one[: len(sizes)] == one[len(sizes) :]) == ("shuffle" in options)  # another order in the second epoch


@pytest.mark.parametrize("taken", [1, 3, 4])
def test_a_loop_goes_on_after_the_batch_at_which_it_was_saved(taken: int) -> None:
    mine = loader(Numbers(), SoloCommunicator(CPU), batch_size=8)
    seen: list[list[int]] = []
    while len(seen) < taken:
        for batch in mine:
            seen.append(batch.tolist())
            if len(seen) == taken:
                break
    state = mine.state_dict()
    assert seen + read(3, state=state) == read(1)
    rest = list(chain(*read(1, state=state, batch_size=5)))  # another batch size goes through the same samples
    assert rest == list(chain(*read(1)))[sum(map(len, seen)) :]


def test_a_state_of_other_data_is_refused() -> None:
    state = loader(Numbers(), SoloCommunicator(CPU), batch_size=8).state_dict()
    for other in (Numbers(21), Numbers()):
        with pytest.raises(DataError, match=r"the loader was saved with (length = 22|seed = 0)"):
            loader(other, SoloCommunicator(CPU), batch_size=8, seed=1).load_state_dict(state)


def test_an_epoch_that_was_left_early_is_followed_by_the_next() -> None:
    mine = loader(Numbers(), SoloCommunicator(CPU), batch_size=8)
    next(iter(mine))
    assert mine.epoch == 1
    assert [batch.tolist() for batch in mine] == read(1)[3:]
    assert len(mine) == 3


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_last_batch_of_fewer_samples_than_ranks_trains_as_in_one_process(strategy: str) -> None:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(9, 6, dtype=torch.float64), torch.arange(9) % 3)

    def work(comm: Any) -> tuple[dict[str, torch.Tensor], float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
        engine = parallelize(model, comm, strategy)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        total, count = torch.zeros((), dtype=torch.float64), 0
        batches = loader(dataset, comm, batch_size=7)  # of which the last has two samples
        for _ in range(2):
            for x, y in batches:  # the loop of docs/convert.md
                loss = F.cross_entropy(engine(x), y, reduction="sum")
                (loss * engine.loss_scale(len(y))).backward()
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
                count += len(y)
        return engine.full_state_dict(), mean(total, count, comm)

    alone, alone_loss = run_virtual(work, ranks=1)[0]
    with pytest.warns(UserWarning, match="has 2 of 7 samples, for 4 ranks"):
        found = run_virtual(work, ranks=4)
    for state, loss in found:
        assert loss == pytest.approx(alone_loss, abs=1e-12)
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def test_ranks_that_will_have_no_sample_get_no_rows_and_are_told_beforehand() -> None:
    with pytest.warns(UserWarning, match=r"has 1 of 7 samples, for 2 ranks: .* or give drop_last=True"):
        made = run_virtual(lambda comm: list(loader(Numbers(), comm, batch_size=7)), ranks=2)
    assert [len(each[-1]) for each in made] == [0, 1]
    with pytest.warns(UserWarning, match="has 1 of 4 samples, for 2 ranks"):  # fewer samples than ranks in all
        made = run_virtual(lambda comm: list(loader(Numbers(1), comm, batch_size=4)), ranks=2)
    assert [batch.tolist() for each in made for batch in each] == [[], [0]]
    with pytest.warns(UserWarning, match="a batch of an epoch has 2 of 2 samples, for 3 ranks"):  # in every step
        made = run_virtual(lambda comm: next(iter(loader(Numbers(4), comm, batch_size=2))), ranks=3)
    assert [len(each) for each in made] == [0, 1, 1]


def test_a_batch_without_samples_has_the_form_of_the_others() -> None:
    batch = {"x": torch.ones(1, 3), "pair": (torch.ones(1, dtype=torch.int64), ["a name"]), "scale": 2.0}
    found = without_rows(batch)
    assert found["x"].shape == (0, 3)
    assert found["pair"][0].dtype == torch.int64
    assert found["pair"][1] == []
    assert found["scale"] == 2.0
    assert without_rows(UserDict(x=torch.ones(1, 2)))["x"].shape == (0, 2)


def test_a_dataloader_is_shared_out_with_its_own_settings() -> None:
    dataset = TensorDataset(torch.arange(10.0), torch.arange(10))

    def join(samples: list[Any]) -> list[torch.Tensor]:
        return [torch.stack([each[0] for each in samples]), torch.stack([each[1] for each in samples])]

    def work(comm: Any) -> list[Any]:
        return [
            torch.cat([batch[1] for batch in shared]).tolist()
            for settings in ({"batch_size": 4}, {"batch_size": 4, "shuffle": True, "collate_fn": join})
            if (shared := shard(DataLoader(dataset, **settings), comm)).dataset is dataset
        ]

    first, second = run_virtual(work, ranks=2)
    assert first[0] == [0, 1, 4, 5, 8]
    assert sorted(first[0] + second[0]) == sorted(first[1] + second[1]) == list(range(10))
    assert first[1] != first[0]


class Stream(IterableDataset[int]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        return iter(range(4))


def test_what_cannot_be_shared_out_is_refused() -> None:
    comm, dataset = SoloCommunicator(CPU), Numbers()
    bad: list[tuple[Any, str]] = [
        (dataset, r"call paceline\.loader"),
        (DataLoader(dataset, batch_size=None), "sample by sample"),
        (DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 0)), "give the DataLoader without it"),
    ]
    for given, message in bad:
        with pytest.raises(UsageError, match=message):
            shard(given, comm)
    with pytest.raises(DataError, match="without access by index"):
        loader(Stream(), comm, batch_size=2)  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_workers_read_the_same_and_live_through_epochs() -> None:
    mine: OwnLoader = loader(Numbers(), SoloCommunicator(CPU), batch_size=8, workers=1)
    try:
        assert [batch.tolist() for _ in range(2) for batch in mine] == read(1)
    finally:
        mine.close()
