"""Mistakes of own loops that train on: the same batches on all ranks, and replicas that drift apart, are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.base import Communicator
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import LedgerCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.data.own_loader import shard
from paceline.engines.apply import parallelize
from paceline.engines.groups import fingerprint, first_equal, is_due, sum_of_bits
from paceline.errors import UsageError

DATA = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def own_loop(work: Callable[[Communicator], Any]) -> list[str]:
    """Runs a loop of the user's own on two ranks; returns the warnings."""

    def follow(comm: Communicator) -> None:
        work(LedgerCommunicator(comm, Ledger(rank=comm.rank, world=comm.size, is_own_loop=True)))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_virtual(follow, ranks=2)
    return [str(each.message) for each in found]


def train(comm: Communicator, batches: Any, strategy: str = "ddp", **options: Any) -> None:
    engine = parallelize(make_model(), comm, strategy, **options)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    for x, y in batches:
        F.cross_entropy(engine(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plain_dataloader_on_all_ranks_is_told_once_with_the_fix(strategy: str) -> None:
    found = own_loop(lambda comm: train(comm, DataLoader(DATA, batch_size=8), strategy))
    assert len(found) == 1
    assert "ranks 0 and 1 of 2 got the same inputs in their first 2 passes" in found[0]
    assert "paceline.shard(dataloader, comm)" in found[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_that_is_shared_out_is_not_warned_of(strategy: str) -> None:
    assert own_loop(lambda comm: train(comm, shard(DataLoader(DATA, batch_size=8), comm), strategy)) == []


def test_constant_batches_and_ranks_of_one_model_may_have_the_same_inputs() -> None:
    probe = [(torch.ones(4, 6), torch.zeros(4, dtype=torch.int64))] * 4
    assert own_loop(lambda comm: train(comm, probe)) == []

    def split(comm: Communicator) -> None:
        torch.manual_seed(0)
        engine = parallelize(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), comm, pipeline=2)
        for x, _ in DataLoader(DATA, batch_size=16):
            engine.run_microbatches([x], lambda model, rows: (model(rows).sum(), len(rows)))

    assert own_loop(split) == []


def test_a_loop_of_ours_is_not_watched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_virtual(lambda comm: train(comm, DataLoader(DATA, batch_size=8)), ranks=2)


def test_a_schedule_by_a_ranks_own_loss_is_told_with_step_rates_and_parameters() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for step, (x, y) in enumerate(shard(DataLoader(DATA, batch_size=8), comm)):
            F.cross_entropy(engine(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(step if comm.rank else -step)  # on rank 1 alone it gets worse

    found = own_loop(work)
    assert len(found) == 1
    assert "in step 4, rank 1 has other values in 4 parameters (0.weight, 0.bias, 2.weight, ...)" in found[0]
    assert "the learning rates 0.025, and rank 0 0.1" in found[0]
    assert "in step 2 both were alike" in found[0]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_other_learning_rates_for_the_parts_of_one_model_are_told(strategy: str) -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm, strategy)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1 / (1 + comm.rank))
        for x, y in shard(DataLoader(DATA, batch_size=8), comm):
            F.cross_entropy(engine(x), y).backward()
            optimizer.step()

    found = own_loop(work)
    assert len(found) == 1
    assert "in step 2, rank 1 has the learning rates 0.05, and rank 0 0.1" in found[0]


def test_an_update_after_no_sync_alone_is_told() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step, (x, y) in enumerate(shard(DataLoader(DATA, batch_size=8), comm)):
            if step == 2:
                with engine.no_sync():
                    F.cross_entropy(engine(x), y).backward()
            else:
                F.cross_entropy(engine(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = own_loop(work)
    assert len(found) == 1
    assert "in step 4, rank 1 has other values" in found[0]
    assert "outside no_sync()" in found[0]


def test_ranks_compare_often_at_first_and_seldom_later() -> None:
    assert [number for number in range(1, 401) if is_due(number)] == [2, 4, 8, 16, 32, 64, 100, 200, 300, 400]


def test_fingerprints_and_sums_tell_other_values_apart() -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert fingerprint((values, {"x": values})) == fingerprint((values.clone(), {"x": values}))
    assert fingerprint(values) != fingerprint(values.view(5, 3))
    assert fingerprint(torch.zeros(4)) == fingerprint(()) == fingerprint(torch.zeros(0)) == 0
    assert first_equal([0, 0, 7, 7]) == (2, 3)
    assert first_equal([0, 0, 7, 8]) is None
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        one = values.to(dtype)
        other = one.clone()
        other[1, 2] = 2.5
        assert sum_of_bits(one) == sum_of_bits(one.t()) != sum_of_bits(other)


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_a_model_that_torch_has_wrapped_already_is_refused_with_the_fix(wrap: Any) -> None:
    wrapped = wrap.__new__(wrap)  # as torch would make it, had its ranks met
    nn.Module.__init__(wrapped)
    wrapped.module = make_model()
    for model in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(UsageError, match=rf"torch's {wrap.__name__} already(.|\n)*is wrapped: model\.module"):
            parallelize(model, SoloCommunicator(torch.device("cpu")))
