"""``engine.accumulate``, ``paceline.gather`` and frozen models: loops of one's own at any number of ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import RankFailedError, UsageError

INPUTS = (torch.arange(23 * 4, dtype=torch.float64) * 0.37).sin().reshape(23, 4)
TARGETS = INPUTS[:, :3].argmax(1)
DATA = TensorDataset(INPUTS, TARGETS)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(comm: Any, strategy: str, batches: int, *, leaves_early: bool = False) -> list[float]:
    engine = paceline.parallelize(make_model(), comm, strategy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
    loader = paceline.loader(DATA, comm, batch_size=5, shuffle=False)
    turns = []
    for _ in range(2):
        for x, y in loader:
            with engine.accumulate(batches, loader) as turn:
                turns.append((turn.number, turn.of, turn.is_last))
                (F.cross_entropy(engine(x), y, reduction="sum") * turn.scale).backward()
                if turn.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
            if leaves_early and turn.is_last:
                break
    if batches == 2 and not leaves_early:
        assert turns == 2 * [(1, 2, False), (2, 2, True), (1, 2, False), (2, 2, True), (1, 1, True)]
    return [each.sum().item() for each in engine.state_dict().values()]


def alone(updates: list[list[int]]) -> list[float]:
    """Returns what one process computes that has these samples in each update."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for samples in updates:
        F.cross_entropy(model(INPUTS[samples]), TARGETS[samples]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.sum().item() for each in model.state_dict().values()]


@pytest.mark.some(6)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize(("batches", "cuts"), [(1, [5, 10, 15, 20]), (2, [10, 20]), (3, [15]), (9, [])])
def test_an_update_has_the_samples_of_its_batches_also_at_the_end(strategy: str, batches: int, cuts: list[int]) -> None:
    ends = [0, *cuts, 23]
    epoch = [list(range(first, last)) for first, last in pairwise(ends)]
    expected = alone(2 * epoch)
    for ranks in (1, 2, 3):
        for found in paceline.run_virtual(lambda comm: train(comm, strategy, batches), ranks=ranks):
            assert found == pytest.approx(expected, abs=1e-12)


def test_a_loop_that_leaves_an_epoch_begins_the_next_with_a_whole_group() -> None:
    expected = alone(2 * [list(range(10))])
    found = paceline.run_virtual(lambda comm: train(comm, "ddp", 2, leaves_early=True), ranks=2)
    assert found[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("case", ["none", "plain", "outside"])
def test_a_loader_that_cannot_tell_is_refused(case: str) -> None:
    def loop(comm: Any) -> None:
        engine = paceline.parallelize(make_model(), comm)
        loader: Any = DataLoader(DATA) if case == "plain" else paceline.loader(DATA, comm, batch_size=5)
        with engine.accumulate(0 if case == "none" else 2, loader):
            pass

    words = {"none": "from 1 on", "plain": "paceline.shard()", "outside": "for batch in loader"}
    with pytest.raises(RankFailedError, match=words[case].replace("(", r"\(").replace(")", r"\)")):
        paceline.run_virtual(loop, ranks=1)


@pytest.mark.filterwarnings("ignore:a batch of an epoch has 3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gathered_rows_are_those_of_one_process_in_its_order(ranks: int) -> None:
    def loop(comm: Any) -> list[torch.Tensor]:
        rows = []
        for x, y in paceline.loader(DATA, comm, batch_size=10, seed=2, drop_last=False):
            rows.append(torch.cat([paceline.gather(x, comm), paceline.gather(y[:, None], comm)], 1))
        return rows

    expected = paceline.run_virtual(loop, ranks=1)[0]
    assert [len(each) for each in expected] == [10, 10, 3]
    for found in paceline.run_virtual(loop, ranks=ranks):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_single_numbers_are_gathered_and_other_shapes_refused() -> None:
    numbers = paceline.run_virtual(lambda comm: paceline.gather(torch.tensor(float(comm.rank)), comm), ranks=3)
    assert [each.tolist() for each in numbers] == 3 * [[0.0, 1.0, 2.0]]
    with pytest.raises(RankFailedError, match="number of rows alone"):
        paceline.run_virtual(lambda comm: paceline.gather(torch.ones(2, comm.rank + 1), comm), ranks=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_frozen_model_is_called_and_saved_and_not_trained(strategy: str) -> None:
    def loop(comm: Any) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        engine = paceline.parallelize(make_model().requires_grad_(False), comm, strategy)
        x = INPUTS[:5].clone().requires_grad_()
        engine(x).square().sum().backward()
        assert x.grad is not None
        with torch.no_grad():
            outputs = engine(x)
        state = engine.state_dict()
        same = all(torch.equal(state[name], value) for name, value in make_model().state_dict().items())
        return outputs, x.grad, engine.num_trained, same

    x = INPUTS[:5].clone().requires_grad_()
    expected = make_model()(x)
    expected.square().sum().backward()
    for outputs, gradient, num_trained, is_same in paceline.run_virtual(loop, ranks=2):
        assert torch.allclose(outputs, expected, atol=1e-15)
        assert x.grad is not None
        assert torch.allclose(gradient, x.grad, atol=1e-15)
        assert (num_trained, is_same) == (0, True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_optimizer_of_a_frozen_model_is_refused(strategy: str) -> None:
    def loop(comm: Any) -> None:
        model = make_model().requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        paceline.parallelize(model, comm, strategy, optimizer=optimizer)

    with pytest.raises(RankFailedError, match="nothing to train"):
        paceline.run_virtual(loop, ranks=2)


@pytest.mark.parametrize("with_a_student", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_step_over_a_frozen_engine_is_refused(strategy: Any, with_a_student: bool) -> None:
    def loop(comm: Any) -> None:
        teacher = paceline.parallelize(make_model().requires_grad_(False), comm, strategy)
        student = paceline.parallelize(make_model(), comm)
        trained = student.parameters() if with_a_student else ()
        student(INPUTS[:2]).square().sum().backward()
        torch.optim.SGD([*trained, *teacher.parameters()], lr=0.1).step()

    with pytest.raises(RankFailedError, match=r"SGD for an engine whose \d+ parameters are all frozen"):
        paceline.run_virtual(loop, ranks=2)


def test_one_optimizer_updates_two_engines_that_are_trained() -> None:
    def loop(comm: Any) -> bool:
        first, second = (paceline.parallelize(make_model(), comm) for _ in range(2))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        (first(INPUTS[:2]).square().sum() + second(INPUTS[:2]).square().sum()).backward()
        optimizer.step()
        before = make_model().state_dict()
        return all(any((e.state_dict()[n] != v).any() for n, v in before.items()) for e in (first, second))

    assert paceline.run_virtual(loop, ranks=2) == [True, True]


def test_an_engine_is_not_parallelized_again() -> None:
    comm = paceline.connect()
    engine: Any = paceline.parallelize(make_model(), comm)
    with pytest.raises(UsageError, match=r"of a DataParallel\n.*\n  train it"):
        paceline.parallelize(engine, comm)
