"""Out of memory on one rank: all ranks run the step again in smaller pieces, and the result is that of a plain run."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.errors import RankFailedError, TrainingError
from paceline.train.loss import CrossEntropy
from paceline.train.step import StepPolicy, train_step
from paceline.train.survive.memory import PROVING_STEPS, Retry, cut_finer, is_out_of_memory

SAMPLES, FEATURES, CLASSES = 8, 6, 3  # of a microbatch


@dataclass(frozen=True)
class Hunger:
    """When a rank runs out of memory: with more samples than this, in forward or backward, from this call on."""

    most: int
    where: str = "forward"
    rank: int = 1
    since: int = 0


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        del context
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del context, gradients
        raise torch.OutOfMemoryError("no room for a gradient")


class Hungry(nn.Module):
    """A small network that holds at most so many samples."""

    def __init__(self, hunger: Hunger | None, rank: int, *, has_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, 12)
        self.norm = nn.BatchNorm1d(12) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(0.25)
        self.last = nn.Linear(12, CLASSES)
        self.num_calls = 0
        self._hunger = hunger if hunger is not None and rank == hunger.rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        hidden = self.first(x)
        hunger = self._hunger
        if hunger is not None and len(x) > hunger.most and self.num_calls > hunger.since:
            if hunger.where == "forward":
                raise torch.OutOfMemoryError("no room for an activation")
            hidden = _FailingBackward.apply(hidden)  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.last(self.dropout(torch.tanh(self.norm(hidden))))
        return result


def batch_of(rank: int, step: int, accumulate: int) -> StepBatch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    microbatches: list[Any] = []
    for _ in range(accumulate):
        inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        microbatches.append((inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)))
    return StepBatch(
        position=0,
        next_position=0,
        epoch=0,
        global_samples=2 * SAMPLES * accumulate,
        microbatches=microbatches,
        local_samples=[SAMPLES] * accumulate,
    )


def train(
    comm: Communicator,
    hunger: Hunger | None,
    *,
    strategy: str = "ddp",
    pieces: int = 1,
    accumulate: int = 2,
    steps: int = 3,
    is_allowed: bool = True,
    has_norm: bool = True,
) -> tuple[dict[str, torch.Tensor], list[float], int, int]:
    """Trains a few steps; returns the state, the losses, the microbatch at the end and the number of updates."""
    model = Hungry(hunger, comm.rank, has_norm=has_norm).double()
    engine = parallelize(model, comm, strategy, sync_batchnorm=False, bucket_mb=0.0001, first_bucket_mb=0.0001)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)
    updates: list[None] = []
    optimizer.register_step_post_hook(lambda *_: updates.append(None))
    torch.manual_seed(50 + comm.rank)
    retry = Retry(SAMPLES, is_allowed=is_allowed)
    losses = []
    for step in range(steps):
        batch = batch_of(comm.rank, step, accumulate)
        if pieces > 1:
            batch = StepBatch(
                position=0,
                next_position=0,
                epoch=0,
                global_samples=batch.global_samples,
                microbatches=cut_finer(batch.microbatches, pieces),
                local_samples=batch.local_samples,
            )
        policy = StepPolicy(dtype=torch.float64)
        outcome = train_step(engine, optimizer, batch, CrossEntropy(1.0), policy, passes=retry)
        losses.append(float(outcome.loss_sum))
    return engine.full_state_dict(), losses, retry.microbatch, len(updates)


def train_with(comm: Communicator, hunger: Hunger | None, options: dict[str, Any]) -> Any:
    return train(comm, hunger, **options)


def assert_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in ours[0].items():
            torch.testing.assert_close(value, theirs[0][name], rtol=0, atol=1e-12, msg=name)
        assert ours[1] == pytest.approx(theirs[1], abs=1e-12)


@functools.cache
def in_halves(strategy: str) -> Any:
    """The plain run in microbatches of half the size."""
    return run_virtual(functools.partial(train, hunger=None, strategy=strategy, pieces=2), ranks=2)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("strategy", "since", "rank", "where"),  # since 0: in the first microbatch, which does not reduce; 1: in the last
    [
        ("ddp", 0, 0, "forward"),
        ("ddp", 0, 1, "backward"),
        ("ddp", 1, 1, "forward"),
        ("ddp", 1, 0, "backward"),
        ("zero1", 0, 0, "backward"),
        ("zero1", 1, 1, "backward"),
        ("zero1", 1, 0, "forward"),
        ("zero2", 0, 1, "backward"),
        ("zero2", 0, 0, "forward"),
        ("zero2", 1, 1, "backward"),
    ],
)
def test_the_step_is_that_of_smaller_microbatches(strategy: str, since: int, rank: int, where: str) -> None:
    hunger = Hunger(most=4, where=where, rank=rank, since=since)
    found = run_virtual(functools.partial(train, hunger=hunger, strategy=strategy), ranks=2)
    assert_same(found, in_halves(strategy))
    assert [each[2] for each in found] == [4, 4]
    assert [each[3] for each in found] == [3, 3]


def test_it_halves_until_it_fits() -> None:
    found = run_virtual(functools.partial(train, hunger=Hunger(most=1), accumulate=1, has_norm=False), ranks=2)
    expected = run_virtual(functools.partial(train, hunger=None, accumulate=1, pieces=8, has_norm=False), ranks=2)
    assert_same(found, expected)
    assert found[0][2] == 1


def test_a_later_step_may_fail_while_the_microbatch_is_new() -> None:
    hunger = Hunger(most=4, since=2 * (PROVING_STEPS - 1))
    found = run_virtual(functools.partial(train, hunger=hunger, steps=PROVING_STEPS + 1), ranks=2)
    assert [each[2:] for each in found] == [(4, PROVING_STEPS + 1)] * 2


def test_one_rank_alone() -> None:
    found = run_virtual(functools.partial(train, hunger=Hunger(most=2, rank=0)), ranks=1)
    expected = run_virtual(functools.partial(train, hunger=None, pieces=4), ranks=1)
    assert_same(found, expected)


def test_real_ranks(gloo_pool: GlooPool) -> None:
    for where in ("forward", "backward"):
        found = gloo_pool.run(train_with, Hunger(most=4, where=where, since=1), {}, ranks=2)
        expected = gloo_pool.run(train_with, None, {"pieces": 2}, ranks=2)
        assert_same(found, expected)
        assert [each[2:] for each in found] == [(4, 3)] * 2


@pytest.mark.parametrize(
    ("options", "hunger", "expected"),
    [
        ({"is_allowed": False}, Hunger(most=4), "set train.microbatch = 4 or auto"),
        ({"strategy": "fsdp"}, Hunger(most=4), "cannot be left half done\n  set train.microbatch = 4"),
        ({"accumulate": 1, "has_norm": False}, Hunger(most=0), "with a microbatch of 1\n"),
        ({"steps": PROVING_STEPS + 1}, Hunger(most=4, since=2 * PROVING_STEPS), "with a microbatch of 8\n"),
    ],
)
def test_where_it_cannot_go_on_it_says_why(options: dict[str, Any], hunger: Hunger, expected: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_virtual(functools.partial(train, hunger=hunger, **options), ranks=2)
    assert isinstance(caught.value.error, TrainingError)
    assert expected in str(caught.value.error)


def test_other_errors_pass() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_microbatches_are_cut_along_the_samples() -> None:
    x, y = torch.arange(10).reshape(5, 2), torch.arange(5)
    cut = cut_finer([(x, {"target": y}), None], 2)
    assert len(cut) == 4
    assert [len(piece[0]) for piece in cut[:2]] == [3, 2]
    assert torch.equal(torch.cat([piece[1]["target"] for piece in cut[:2]]), y)
    assert cut[2:] == [None, None]
    small = cut_finer([(x[:1], y[:1])], 3)
    assert small[1:] == [None, None]


@pytest.mark.parametrize("batch", [(torch.zeros(4, 2), ["a"] * 4), (torch.zeros(4), torch.zeros(3)), torch.tensor(1.0)])
def test_what_cannot_be_cut_is_refused(batch: Any) -> None:
    with pytest.raises(TrainingError, match="cannot be cut"):
        cut_finer([batch], 2)
