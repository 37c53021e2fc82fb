"""The loss scale: how it moves, that ranks agree on it, and that it is continued."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from covering import covering
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.precision import PRECISIONS
from paceline.errors import UsageError
from paceline.train.loss import CrossEntropy, LossValue
from paceline.train.step import LossScaler, ScalerPolicy, StepPolicy, make_scaler, train_step

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(1.0), torch.tensor(math.inf)


def test_the_scale_backs_off_at_once_and_grows_after_an_interval() -> None:
    scaler = LossScaler(CPU, ScalerPolicy(initial=64.0, growth=4.0, backoff=0.25, growth_interval=3))
    scales = []
    for norm in (BAD, BAD, GOOD, GOOD, torch.tensor(math.nan), GOOD, GOOD, GOOD, GOOD):
        scaler.update(norm)
        scales.append(scaler.scale.item())
    assert scales == [16, 4, 4, 4, 1, 1, 1, 4, 4]  # a bad step in between starts the interval again


def test_a_scale_that_was_handed_out_does_not_change_later() -> None:
    scaler = LossScaler(CPU)
    used = scaler.scale
    scaler.update(BAD)
    assert (used.item(), scaler.scale.item()) == (65536.0, 32768.0)


def test_only_fp16_is_scaled() -> None:
    made = {name: make_scaler(policy, CPU, 8.0) for name, policy in PRECISIONS.items()}
    assert [name for name, scaler in made.items() if scaler is not None] == ["fp16"]
    assert made["fp16"] is not None
    assert made["fp16"].scale.item() == 8.0


@pytest.mark.parametrize("wrong", [{"initial": 0.0}, {"growth": 0.5}, {"backoff": 1.0}, {"growth_interval": 0}])
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="leave them at their defaults"):
        ScalerPolicy(**wrong)


def test_factors_undo_one_another_for_a_known_count_and_for_a_guess() -> None:
    scaler = LossScaler(CPU, ScalerPolicy(initial=256.0))
    before, after = scaler.factors(4, 12.0)
    # Averaged over 4 ranks, the gradient of (sum / 12) is a quarter of it.
    assert before.item() * after.item() == pytest.approx(4 / 12)
    for expected in (10.0, 32.0):
        before, after = scaler.factors(4, None, guess=10)
        assert before.item() == pytest.approx(256 / expected)
        assert before.item() * after.item() == pytest.approx(1.0)
        scaler.note_elements(torch.tensor(32.0, dtype=torch.float64))


def test_a_step_without_elements_leaves_a_scale_that_is_finite() -> None:
    scaler = LossScaler(CPU)
    scaler.note_elements(torch.tensor(0.0))
    assert all(factor.isfinite() for factor in scaler.factors(2, None))


def test_the_state_is_continued_exactly() -> None:
    policy = ScalerPolicy(growth_interval=5)
    scaler, other = LossScaler(CPU, policy), LossScaler(CPU, policy)
    scaler.note_elements(torch.tensor(7.0))
    for norm in (BAD, GOOD, GOOD, GOOD):
        scaler.update(norm)
    state = scaler.state_dict()
    assert state == {"scale": 32768.0, "num_good": 3, "elements": 7.0}
    other.load_state_dict(state)
    for norm in (GOOD, GOOD, BAD, GOOD):
        scaler.update(norm)
        other.update(norm)
        assert scaler.state_dict() == other.state_dict()


# In training.


class Overflows(CrossEntropy):
    """A loss whose gradient overflows on one rank, in some calls there."""

    def __init__(self, is_bad: bool, calls: set[int], elements: float | None = 1.0) -> None:
        super().__init__(elements)
        self._is_bad, self._calls, self._num_calls = is_bad, calls, 0

    def __call__(self, model: Any, batch: Any) -> LossValue:
        self._num_calls += 1
        value = super().__call__(model, batch)
        if self._is_bad and self._num_calls in self._calls:
            return LossValue(value.total * 1e30, value.count)  # the loss is finite, its gradient is not
        return value


def batches(comm: Communicator, steps: int) -> list[StepBatch]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(steps):
        inputs, targets = torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator)
        rows = slice(6 * comm.rank // comm.size, 6 * (comm.rank + 1) // comm.size)
        made.append(
            StepBatch(
                position=0,
                next_position=6,
                epoch=0,
                global_samples=6,
                microbatches=[(inputs[rows], targets[rows])],
                local_samples=[len(inputs[rows])],
            )
        )
    return made


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


@covering(bad_rank=[0, 2], strategy=STRATEGIES, elements={"count known": 1.0, "count exchanged": None})
def test_ranks_take_the_same_decision_when_one_of_them_overflows(
    bad_rank: int, strategy: str, elements: float | None
) -> None:
    def work(comm: Communicator) -> tuple[list[float], list[bool], dict[str, torch.Tensor]]:
        engine = parallelize(make_model(), comm, strategy, precision="fp16")
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01, fused=True)
        scaler = make_scaler(engine.precision, CPU, 128.0)
        loss = Overflows(comm.rank == bad_rank, {2, 3}, elements)
        scales, finite, states = [], [], []
        for batch in batches(comm, 5):
            outcome = train_step(engine, optimizer, batch, loss, StepPolicy(), scaler=scaler)
            assert outcome.loss_scale is not None
            scales.append(outcome.loss_scale.item())
            finite.append(bool(outcome.grad_norm.isfinite()))
            states.append(engine.full_state_dict())
        for before, after in ((0, 1), (1, 2)):  # the steps that were left out
            assert all(torch.equal(states[before][name], value) for name, value in states[after].items())
        assert not torch.equal(states[2]["0.weight"], states[3]["0.weight"])
        return scales, finite, states[-1]

    results = run_virtual(work, 3)
    for scales, finite, state in results:
        assert scales == [128.0, 128.0, 64.0, 32.0, 32.0]
        assert finite == [True, False, False, True, True]
        assert all(torch.equal(value, results[0][2][name]) for name, value in state.items())


@pytest.mark.parametrize("elements", [1.0, None], ids=["count known", "count exchanged"])
def test_a_scaled_step_is_the_step_without_a_scale(elements: float | None) -> None:
    """Powers of two scale exactly: with any of them, the gradients of these numbers are the same."""

    def norms(initial: float | None, ranks: int) -> list[float]:
        def work(comm: Communicator) -> list[float]:
            engine = parallelize(make_model(), comm)
            optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
            scaler = None if initial is None else LossScaler(CPU, ScalerPolicy(initial=initial))
            steps = [
                train_step(engine, optimizer, batch, CrossEntropy(elements), StepPolicy(clip_norm=0.5), scaler=scaler)
                for batch in batches(comm, 4)
            ]
            return [step.grad_norm.item() for step in steps]

        return run_virtual(work, ranks)[0]

    plain = norms(None, 1)
    for initial in (1.0, 2.0**-9, 2.0**20):
        for ranks in (1, 2):
            assert norms(initial, ranks) == pytest.approx(plain, rel=1e-5)


def test_small_gradients_survive_in_fp16_only_with_a_scale() -> None:
    """A gradient of 1e-9 is zero in fp16."""

    def gradient(scale: float) -> float:
        engine = parallelize(nn.Linear(1, 1, bias=False), SoloCommunicator(CPU), precision="fp16")
        scaler = LossScaler(CPU, ScalerPolicy(initial=scale))
        seen: list[float] = []
        optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
        optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.item() for p in engine.parameters()))

        class Tiny(CrossEntropy):
            def __call__(self, model: Any, batch: Any) -> LossValue:
                return LossValue(model(batch[0]).float().sum() * 1e-9, 1.0)

        batch = StepBatch(
            position=0,
            next_position=1,
            epoch=0,
            global_samples=1,
            microbatches=[(torch.ones(1, 1), None)],
            local_samples=[1],
        )
        train_step(engine, optimizer, batch, Tiny(1.0), StepPolicy(), scaler=scaler)
        return seen[0]

    assert gradient(1.0) == 0.0
    assert gradient(65536.0) == pytest.approx(1e-9, rel=1e-3)
