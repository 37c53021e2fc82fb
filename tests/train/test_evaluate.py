"""Exact evaluation: every sample once, the same numbers on every rank and for any number of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.data.datasets import TensorPairs
from paceline.data.loader import EvalLoader
from paceline.engines.apply import parallelize
from paceline.train.evaluate import Evaluation, evaluate
from paceline.train.loss import IGNORED, CrossEntropy, CustomLoss, Loss, LossValue

RANKS = [1, 2, 3, 4]


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def make_data(length: int) -> TensorPairs:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(length, 4, generator=generator, dtype=torch.float64)
    return TensorPairs(inputs, torch.randint(3, (length,), generator=generator))


def run(
    ranks: int, data: TensorPairs, loss: Loss, batch: int = 8, model: Callable[[], nn.Module] = make_model
) -> list[Evaluation]:
    def work(comm: Communicator) -> Evaluation:
        engine = parallelize(model(), comm)
        with closing(EvalLoader(data, batch, comm.rank, comm.size)) as loader:
            return evaluate(engine, loader, loss, torch.float64)

    return run_virtual(work, ranks)


class Dyadic(Loss):
    """Sums of small powers of two: exact in any order, so that equality can be asked for."""

    elements_per_sample = None

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        raise NotImplementedError

    def score(self, model: Callable[..., Any], batch: Any) -> LossValue:
        inputs, targets = batch
        model(inputs)
        return LossValue((targets.double() + 0.125).sum(), len(targets), (targets == 1).sum())


@covering(always={"batch": [8]}, batch=[1, 4, 8, 21, 64], ranks=RANKS)
def test_21_samples_give_the_numbers_of_one_process_exactly(ranks: int, batch: int) -> None:
    data = make_data(21)
    expected = Evaluation(
        loss=float((data.targets.double() + 0.125).sum()) / 21, accuracy=int((data.targets == 1).sum()) / 21, samples=21
    )
    assert run(ranks, data, Dyadic(), batch) == [expected] * ranks


@pytest.mark.parametrize("elements", [1.0, None])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_real_model_on_21_samples(ranks: int, elements: float | None) -> None:
    """Accuracy and count exactly; the loss but for the last bits, in which a sum depends on its order."""
    data = make_data(21)
    model = make_model().eval()
    with torch.no_grad():
        logits = model(data.inputs)
    expected = float(F.cross_entropy(logits, data.targets))
    accuracy = int((logits.argmax(1) == data.targets).sum()) / 21
    results = run(ranks, data, CrossEntropy(elements))
    assert len(set(results)) == 1
    assert results[0].loss == pytest.approx(expected, abs=1e-13)
    assert (results[0].accuracy, results[0].samples) == (accuracy, 21)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_every_sample_counts_once(length: int, batch: int, ranks: int) -> None:
    data = make_data(length)
    (expected,) = run(1, data, Dyadic(), length, model=lambda: nn.Linear(4, 3).double())
    assert run(ranks, data, Dyadic(), batch, model=lambda: nn.Linear(4, 3).double()) == [expected] * ranks
    assert expected.samples == length


def test_one_sample_on_four_ranks() -> None:
    data = make_data(1)
    assert run(4, data, CrossEntropy(1.0)) == run(1, data, CrossEntropy(1.0)) * 4


def squared(model: Callable[..., Any], batch: Any) -> tuple[torch.Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def test_ranks_without_samples_agree_that_there_is_no_accuracy() -> None:
    """A loss without right answers has no accuracy: on no rank, also on those that never called it."""
    results = run(4, make_data(1), CustomLoss(squared, "squared"))
    assert [result.accuracy for result in results] == [None] * 4
    assert len({result.loss for result in results}) == 1


def test_ignored_targets_count_in_neither_loss_nor_accuracy() -> None:
    data = make_data(9)
    data.targets[[0, 4, 8]] = IGNORED
    logits = make_model().eval()(data.inputs).detach()
    kept = data.targets != IGNORED
    expected = float(F.cross_entropy(logits[kept], data.targets[kept]))
    accuracy = float((logits[kept].argmax(1) == data.targets[kept]).double().mean())
    for result in run(3, data, CrossEntropy(None), batch=4):
        assert result.loss == pytest.approx(expected, abs=1e-13)
        assert result.accuracy == pytest.approx(accuracy)
        assert result.samples == 9


def test_an_evaluation_without_any_target_is_no_division_by_zero() -> None:
    data = make_data(3)
    data.targets.fill_(IGNORED)
    assert run(2, data, CrossEntropy(None)) == [Evaluation(loss=0.0, accuracy=0.0, samples=3)] * 2


def test_evaluation_communicates_once() -> None:
    def work(comm: Communicator) -> dict[str, int]:
        traced = TracedCommunicator(comm, Trace(comm.device))
        engine = parallelize(make_model(), traced)
        traced.trace.num_operations.clear()
        evaluate(engine, EvalLoader(make_data(21), 4, comm.rank, comm.size), CrossEntropy(1.0), torch.float64)
        return dict(traced.trace.num_operations)

    assert run_virtual(work, 2) == [{"all_reduce": 1}] * 2


def test_modes_of_the_modules_are_given_back_one_by_one() -> None:
    """A part that a user keeps in evaluation mode (frozen batch norm) does not start training after an evaluation."""
    engine = parallelize(make_model(), SoloCommunicator(torch.device("cpu")))
    engine.train()
    engine.module.get_submodule("2").eval()
    before = {name: module.training for name, module in engine.module.named_modules()}
    loader = EvalLoader(make_data(4), 4)
    evaluate(engine, loader, CrossEntropy(1.0), torch.float64)
    assert {name: module.training for name, module in engine.module.named_modules()} == before
    assert before["2"] is False

    class Fails(CrossEntropy):
        def score(self, *_: Any) -> LossValue:
            assert not engine.module.training
            raise MemoryError("no room")

    with pytest.raises(MemoryError):
        evaluate(engine, loader, Fails(1.0), torch.float64)
    assert {name: module.training for name, module in engine.module.named_modules()} == before


def test_gradients_and_randomness_are_left_alone() -> None:
    engine = parallelize(make_model(), SoloCommunicator(torch.device("cpu")))
    engine(make_data(4).inputs).sum().backward()
    gradients = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
    state = torch.get_rng_state()
    evaluate(engine, EvalLoader(make_data(9), 4), CrossEntropy(1.0), torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, gradient in zip(engine.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def make_normed() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_evaluate_the_model_of_rank_0(ranks: int) -> None:
    """Each rank moves its own batch-norm statistics in a step; what is evaluated is what a checkpoint would hold."""
    data = make_data(21)

    def work(comm: Communicator) -> tuple[Evaluation, dict[str, torch.Tensor]]:
        engine = parallelize(make_normed(), comm, sync_batchnorm=False)
        rows = data.inputs[comm.rank :: comm.size] * (comm.rank + 1)
        engine(rows).square().mean().backward()
        state = engine.full_state_dict()
        loader = EvalLoader(data, 8, comm.rank, comm.size)
        return evaluate(engine, loader, CrossEntropy(1.0), torch.float64), state

    results = run_virtual(work, ranks)
    states = [state for _, state in results]
    assert not torch.equal(states[0]["1.running_mean"], states[1]["1.running_mean"])  # or this test tests nothing

    single = make_normed()
    single.load_state_dict(states[0])
    engine = parallelize(single, SoloCommunicator(torch.device("cpu")))
    expected = evaluate(engine, EvalLoader(data, 8), CrossEntropy(1.0), torch.float64)
    for result, _ in results:
        assert result.loss == pytest.approx(expected.loss, abs=1e-13)
        assert result.accuracy == expected.accuracy


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_ranks_without_samples_take_part_in_every_batch(strategy: str) -> None:
    """Nine samples in batches of eight: the last batch is one rank's, and the others sit it out."""
    data = TensorPairs(torch.randn(9, 4, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3)

    def make() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def work(comm: Communicator) -> Evaluation:
        engine = parallelize(make(), comm, strategy)
        return evaluate(engine, EvalLoader(data, 8, comm.rank, comm.size), CrossEntropy(1.0), torch.float64)

    alone = parallelize(make(), SoloCommunicator(torch.device("cpu")))
    expected = evaluate(alone, EvalLoader(data, 8), CrossEntropy(1.0), torch.float64)
    for found in run_virtual(work, 3):
        assert found.samples == 9
        assert found.loss == pytest.approx(expected.loss, abs=1e-13)
        assert found.accuracy == expected.accuracy
