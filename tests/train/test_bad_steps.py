"""Steps that are not finite are counted, and what overflowed first is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.precision import PRECISIONS
from paceline.train.loss import CrossEntropy, LossValue
from paceline.train.step import Passes, StepOutcome
from paceline.train.survive.recovery import BadStep, BadSteps, Overflow, explain_bad_steps, find_overflow

CPU = torch.device("cpu")
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)


def outcome(norm: float, device: str = "cpu") -> StepOutcome:
    return StepOutcome(loss_sum=torch.zeros(()), count=1.0, grad_norm=torch.tensor(norm, device=device))


def run(counter: BadSteps, norms: list[float], device: str = "cpu") -> list[tuple[int, int, int]]:
    """Returns (step when it was told, bad step, how many in a row)."""
    told = []
    for step, norm in enumerate(norms, start=1):
        told += [(step, bad.step, bad.num_in_a_row) for bad in counter.note(step, outcome(norm, device), f"b{step}")]
    return told


def test_bad_steps_are_told_of_at_once_and_good_ones_end_the_row() -> None:
    counter = BadSteps()
    nan, inf = math.nan, math.inf
    assert run(counter, [1.0, nan, inf, -inf, 2.0, nan]) == [(2, 2, 1), (3, 3, 2), (4, 4, 3), (6, 6, 1)]
    assert (counter.num_skipped, counter.num_in_a_row) == (4, 1)
    assert list(counter.read()) == []


@pytest.mark.parametrize("device", [CUDA])
def test_on_cuda_the_first_of_a_row_is_told_of_one_step_later(device: str) -> None:
    counter = BadSteps()
    nan = math.nan
    assert run(counter, [1.0, nan, nan, nan, 2.0, 1.0, nan], device) == [(3, 2, 1), (3, 3, 2), (4, 4, 3)]
    assert [bad.step for bad in counter.read()] == [7]
    assert (counter.num_skipped, counter.num_in_a_row) == (4, 1)


def test_a_bad_step_carries_its_batch_and_what_a_record_tells() -> None:
    (bad,) = BadSteps().note(4, outcome(math.inf), "batch")
    assert (bad.batch, bad.detail()) == ("batch", {"grad_norm": math.inf, "in_a_row": 1})
    scaled = StepOutcome(
        loss_sum=torch.zeros(()), count=1.0, grad_norm=torch.tensor(math.nan), loss_scale=torch.tensor(8.0)
    )
    (bad,) = BadSteps().note(4, scaled, None)
    assert bad.detail()["loss_scale"] == 8.0


def test_counts_are_continued() -> None:
    counter, other = BadSteps(), BadSteps()
    run(counter, [math.nan, 1.0, math.nan, math.nan])
    other.load_state_dict(counter.state_dict())
    (bad,) = other.note(5, outcome(math.nan), None)
    assert (bad.num_in_a_row, other.num_skipped) == (3, 4)


# What overflowed.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 3)
        self.shout = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs) * self.shout))


def make_batch(value: float = 1.0) -> Any:
    inputs = torch.ones(2, 4)
    inputs[1, 2] = value
    return inputs, torch.zeros(2, dtype=torch.int64)


def find(
    break_model: Callable[[Any], None] = lambda _: None,
    *,
    loss: Any = None,
    batch: Any = None,
    strategy: str = "ddp",
    ranks: int = 2,
    bad_rank: int = 1,
    precision: str = "fp32",
) -> Overflow | None:
    """Breaks something on one rank; returns what all ranks found, which is the same."""

    def work(comm: Communicator) -> Overflow | None:
        torch.manual_seed(0)
        model = Model()
        engine = parallelize(model, comm, strategy, precision=precision)
        is_bad = comm.rank == bad_rank % ranks
        if is_bad:
            break_model(model)
        mine = batch if batch is not None and is_bad else make_batch()
        used = loss if loss is not None and is_bad else CrossEntropy(1.0)
        found = find_overflow(Passes(engine, [make_batch(), mine], used, 1.0, torch.float32))
        assert all(p.grad is None for p in engine.parameters())
        return found

    found = run_virtual(work, ranks)
    assert all(each == found[0] for each in found)
    return found[0]


STRATEGIES = ["ddp", "zero2", "fsdp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_module_whose_output_is_not_finite_is_named(strategy: str) -> None:
    def shout(model: Model) -> None:
        model.second[0].register_forward_hook(lambda *args: args[2] * math.inf)

    found = find(shout, strategy=strategy)
    assert found is not None
    assert str(found) == "second.0 (Linear) in forward: 8 inf in 8 numbers of its output, on rank 1"


def test_an_overflow_in_fp16_is_found_where_it_arises() -> None:
    def shout(model: Model) -> None:
        model.first.weight.data.fill_(3e4)  # times four inputs is more than fp16 holds

    assert str(find(shout, precision="fp16", ranks=1)).startswith("first (Linear) in forward: 8 inf in 8 numbers")
    assert find(shout, precision="bf16", ranks=1) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_that_are_not_finite_are_named_before_any_module(strategy: str) -> None:
    found = find(batch=make_batch(math.nan), strategy=strategy)
    assert str(found) == "the data of microbatch 1: 1 nan in 8 numbers of shape [2, 4], on rank 1"


def test_a_parameter_that_is_not_finite_is_named() -> None:
    def poison(model: Model) -> None:
        model.last.bias.data[1] = math.inf

    assert str(find(poison)) == "the parameter last.bias itself: 1 inf in 3 numbers, on rank 1"


def test_a_loss_that_overflows_by_itself_is_named() -> None:
    class Huge(CrossEntropy):
        def __call__(self, model: Any, batch: Any) -> LossValue:
            value = super().__call__(model, batch)
            return LossValue(value.total * 1e38 * 1e30, value.count)

    assert str(find(loss=Huge(1.0))) == "the loss is inf, on rank 1"


class Steep(CrossEntropy):
    """The square root has no slope at 0: the loss is finite, the gradient is not."""

    def __call__(self, model: Any, batch: Any) -> LossValue:
        value = super().__call__(model, batch)
        return LossValue(value.total + (value.total - value.total.detach()).sqrt(), value.count)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_forward_is_finite_the_first_gradient_in_backward_is_named(strategy: str) -> None:
    found = find(loss=Steep(1.0), strategy=strategy)
    assert found is not None
    assert found.what.startswith("the gradient of last.")


def test_a_replay_that_is_finite_finds_nothing() -> None:
    assert find() is None


def test_a_rank_without_samples_takes_part_in_the_replay() -> None:
    def work(comm: Communicator) -> str:
        torch.manual_seed(0)
        engine = parallelize(Model(), comm, "fsdp")
        microbatches = [make_batch(math.inf)] if comm.rank == 0 else [None]
        return str(find_overflow(Passes(engine, microbatches, CrossEntropy(1.0), 1.0, torch.float32)))

    assert run_virtual(work, 2) == ["the data of microbatch 0: 1 inf in 8 numbers of shape [2, 4], on rank 0"] * 2


def bad_step(scale: float | None = None) -> BadStep:
    used = None if scale is None else torch.tensor(scale)
    result = StepOutcome(loss_sum=torch.zeros(()), count=1.0, grad_norm=torch.tensor(math.nan), loss_scale=used)
    return BadStep(step=17, grad_norm=math.nan, num_in_a_row=10, outcome=result, batch=None)


def test_the_explanation_has_values_place_and_advice() -> None:
    finding = Overflow(2, 3, 1, "blocks.3.mlp (Linear) in forward: 5 inf in 64 numbers of its output")
    assert explain_bad_steps(bad_step(64.0), finding, PRECISIONS["fp16"]) == (
        "10 steps in a row had gradients that are not finite, up to step 17 (gradient norm nan, loss scale 64)\n"
        "  the first numbers that are not finite: blocks.3.mlp (Linear) in forward: 5 inf in 64 numbers of its output, "
        "on rank 1\n"
        "  those steps were left out, and the parameters are as they were before; use train.precision = bf16, which "
        "has the range of fp32, or lower optim.lr"
    )
    assert "lower optim.lr, set optim.clip_norm, or" in explain_bad_steps(bad_step(), finding, PRECISIONS["fp32"])
    assert "not finite: none in a repetition" in explain_bad_steps(bad_step(), None, PRECISIONS["fp32"])
    data = Overflow(0, 0, 0, "the data of microbatch 0: 1 nan in 8 numbers of shape [2, 4]")
    assert "repair or leave out these samples" in explain_bad_steps(bad_step(), data, PRECISIONS["fp16"])


def test_solo_works_too() -> None:
    engine = parallelize(Model(), SoloCommunicator(CPU))
    assert find_overflow(Passes(engine, [make_batch()], CrossEntropy(1.0))) is None
    assert not any(module._forward_hooks for module in engine.module.modules())  # the search leaves none behind
