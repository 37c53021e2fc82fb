"""One step, however the global batch is cut: the gradients are those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import covering
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.data.datasets import TensorPairs
from paceline.data.loader import StepBatch, TrainLoader
from paceline.data.order import DataOrder
from paceline.engines.apply import parallelize
from paceline.train.loss import IGNORED, CrossEntropy, Loss
from paceline.train.step import StepCallbacks, StepOutcome, StepPolicy, place, train_step

TOLERANCE = 1e-12
CUTS = {f"{ranks} ranks, {parts} parts": (ranks, parts) for ranks in (1, 2, 4) for parts in (1, 2, 4)}
CLIP = 0.05  # far below the norms here, so that clipping bites
Gradients = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7)).double()


@functools.cache
def data() -> TensorPairs:
    """19 samples of 5 tokens, some of them ignored: very unevenly, and in one sample all."""
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randint(7, (19, 5), generator=generator)
    targets = torch.randint(7, (19, 5), generator=generator)
    targets[3:8, 1:] = IGNORED
    targets[11] = IGNORED
    return TensorPairs(inputs, targets)


def order(batch: int) -> DataOrder:
    return DataOrder(length=19, global_batch=batch, seed=1)


def watch(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Gradients]:
    """Keeps the gradients that each update saw."""
    seen: list[Gradients] = []

    def keep(*_: Any) -> None:
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    return seen


def train_plain(loss: Loss, batch: int, steps: int) -> tuple[list[Gradients], list[float], nn.Module]:
    """One process on whole batches: plain PyTorch, no engine, no loader."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    seen, norms, position = watch(optimizer, model), [], 0
    for _ in range(steps):
        global_batch = order(batch).batch_at(position)
        position = global_batch.next_position
        value = loss(model, data().take(torch.from_numpy(global_batch.indices)))
        optimizer.zero_grad()
        (value.total / value.count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return seen, norms, model


def train_ranks(
    comm: Communicator, loss: Loss, batch: int, steps: int, accumulate: int
) -> tuple[list[Gradients], list[float], nn.Module]:
    engine = parallelize(make_model(), comm, bucket_mb=2e-4, first_bucket_mb=1e-4)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5, momentum=0.9)
    seen, norms = watch(optimizer, engine.module), []
    loader = TrainLoader(data(), order(batch), rank=comm.rank, ranks=comm.size, accumulate=accumulate)
    for step_batch in loader.steps(0, steps):
        policy = StepPolicy(clip_norm=CLIP, dtype=torch.float64)
        outcome = train_step(engine, optimizer, step_batch, loss, policy)
        norms.append(float(outcome.grad_norm))
    return seen, norms, engine.module


@pytest.mark.some(3)
@covering(
    always={"cut": ["4 ranks, 4 parts", "1 ranks, 4 parts"]},
    cut=CUTS,
    loss={"count known": CrossEntropy(5.0), "count exchanged": CrossEntropy(None)},
    batch={"the last of 3": 8, "the last of 4": 5},  # 19 = 8 + 8 + 3 = 5 + 5 + 5 + 4
)
def test_gradients_do_not_depend_on_the_cut(cut: tuple[int, int], loss: Loss, batch: int) -> None:
    """Ragged batches of 8, 3, 5 and 4 samples in up to 16 parts: some ranks have none of a microbatch, or of a step."""
    steps, (ranks, accumulate) = 5, cut
    gradients, norms, model = train_plain(loss, batch, steps)
    for found, found_norms, found_model in run_virtual(
        lambda comm: train_ranks(comm, loss, batch, steps, accumulate), ranks
    ):
        assert found_norms == pytest.approx(norms, abs=TOLERANCE)
        assert len(found) == steps
        for ours, expected in zip(found, gradients, strict=True):
            assert ours.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(ours[name], gradient, rtol=0, atol=TOLERANCE)
        for ours_p, expected_p in zip(found_model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours_p, expected_p, rtol=0, atol=TOLERANCE)


def test_the_data_is_ragged_enough_to_tell_a_mean_of_means() -> None:
    """Guards the test above: on these batches a mean over microbatches is another gradient."""
    loss, model = CrossEntropy(None), make_model()
    inputs, targets = data().take(torch.from_numpy(order(8).batch_at(0).indices))
    whole = loss(model, (inputs, targets))
    pieces = [loss(model, (x, y)) for x, y in zip(inputs.split(2), targets.split(2), strict=True)]
    means = [piece.total / piece.count for piece in pieces if float(piece.count)]
    (expected,) = torch.autograd.grad(whole.total / whole.count, [model[3].bias])
    (wrong,) = torch.autograd.grad(torch.stack(means).mean(), [model[3].bias])
    assert (expected - wrong).abs().max() > 1e-3


# Uneven numbers of microbatches: nothing hangs.


def step_of(sizes: list[int], start: int, total: int) -> StepBatch:
    """A step with microbatches of the given sizes, cut from the first ``total`` samples; 0 is no microbatch."""
    microbatches: list[Any] = []
    for size in sizes:
        indices = torch.arange(start, start + size)
        microbatches.append(data().take(indices) if size else None)
        start += size
    return StepBatch(
        position=0,
        next_position=total,
        epoch=0,
        global_samples=total,
        microbatches=microbatches,
        local_samples=list(sizes),
    )


UNEVEN = {
    "5, 3 and no microbatches": [[1, 2, 1, 1, 3], [2, 2, 1], []],
    "none on the first rank": [[], [3, 1], [2]],
    "none but on the last rank": [[0, 0], [0], [4, 1]],
    "none here and there": [[0, 2, 0], [1, 0, 1], [0, 0, 3]],
    "one sample": [[0], [0], [1]],
}


@covering(shares=UNEVEN, loss={"count known": CrossEntropy(5.0), "count exchanged": CrossEntropy(None)})
def test_ranks_with_uneven_microbatches(shares: list[list[int]], loss: Loss) -> None:
    """Three steps, so that the learned buckets meet them too; between them the ranks change places."""
    total = sum(map(sum, shares))
    steps = [shares, shares[1:] + shares[:1], shares]

    single = make_model()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.5)
    expected = watch(optimizer, single)
    for _ in steps:
        value = loss(single, data().take(torch.arange(total)))
        optimizer.zero_grad()
        (value.total / value.count).backward()
        optimizer.step()

    def work(comm: Communicator) -> list[Gradients]:
        engine = parallelize(make_model(), comm, bucket_mb=2e-4, first_bucket_mb=1e-4)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
        seen = watch(optimizer, engine.module)
        for step in steps:
            batch = step_of(step[comm.rank], sum(map(sum, step[: comm.rank])), total)
            train_step(engine, optimizer, batch, loss, StepPolicy(dtype=torch.float64))
        return seen

    for found in run_virtual(work, ranks=3):
        for ours, theirs in zip(found, expected, strict=True):
            for name, gradient in theirs.items():
                torch.testing.assert_close(ours[name], gradient, rtol=0, atol=TOLERANCE)


class Remembers(nn.Module):
    """Has a buffer that moves with the data, as batch norm has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level.copy_(x.detach().mean().reshape(1))
        return self.linear(x)


def test_a_rank_without_samples_takes_part_in_the_exchange_of_buffers() -> None:
    def work(comm: Communicator) -> list[float]:
        torch.manual_seed(0)
        engine = parallelize(Remembers(), comm)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        norms = []
        for _ in range(2):
            batch = step_of([0], 0, 4)
            if comm.rank == 0:
                pair = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
                batch = StepBatch(
                    position=0, next_position=4, epoch=0, global_samples=4, microbatches=[pair], local_samples=[4]
                )
            outcome = train_step(engine, optimizer, batch, CrossEntropy(1.0), StepPolicy(clip_norm=1.0))
            norms.append(float(outcome.grad_norm))
        return norms

    first, second = run_virtual(work, ranks=2)
    assert first == second
    assert all(norm > 0 for norm in first)


# A step that counts nothing.


def test_a_step_in_which_every_target_is_ignored_moves_nothing() -> None:
    def work(comm: Communicator) -> tuple[dict[str, torch.Tensor], StepOutcome]:
        engine = parallelize(make_model(), comm)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
        pair = data().take(torch.tensor([11]))
        batch = StepBatch(
            position=0, next_position=2, epoch=0, global_samples=2, microbatches=[pair], local_samples=[1]
        )
        outcome = train_step(engine, optimizer, batch, CrossEntropy(None), StepPolicy(clip_norm=1.0))
        return engine.full_state_dict(), outcome

    for state, outcome in run_virtual(work, ranks=2):
        assert float(outcome.loss_sum) == float(outcome.count) == 0.0
        assert float(outcome.grad_norm) == 0.0
        for name, value in make_model().state_dict().items():
            assert torch.equal(state[name], value)


# What a step communicates and reports.


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("loss", "extra"), [(CrossEntropy(5.0), 0), (CrossEntropy(None), 1)], ids=["known", "exchanged"]
)
def test_accumulation_costs_no_communication(loss: Loss, extra: int, accumulate: int) -> None:
    """One all-reduce a bucket and step, whatever the number of microbatches; a count to be exchanged is one more."""

    def work(comm: Communicator) -> list[dict[str, int]]:
        traced = TracedCommunicator(comm, Trace(comm.device))
        engine = parallelize(make_model(), traced)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
        loader = TrainLoader(data(), order(8), rank=comm.rank, ranks=comm.size, accumulate=accumulate)
        counts = []
        for batch in loader.steps(0, 3):
            traced.trace.num_operations.clear()
            train_step(engine, optimizer, batch, loss, StepPolicy(clip_norm=1.0, dtype=torch.float64))
            counts.append(dict(traced.trace.num_operations))
        return counts[1:]  # the first step also agrees on the buckets

    for counts in run_virtual(work, ranks=2):
        assert counts == [{"all_reduce": 1 + extra}] * 2


class Phases:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def lap(self, phase: str) -> None:
        self.seen.append(phase)


@pytest.mark.parametrize(
    ("loss", "sizes", "expected"),
    [
        (CrossEntropy(5.0), [2, 3], ["forward", "backward", "forward", "backward", "optimizer"]),
        (CrossEntropy(None), [2], ["forward", "backward", "backward", "optimizer"]),
        (CrossEntropy(5.0), [0], ["backward", "optimizer"]),
    ],
)
def test_phases_are_marked_in_order(loss: Loss, sizes: list[int], expected: list[str]) -> None:
    engine = parallelize(make_model(), SoloCommunicator(torch.device("cpu")))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
    phases = Phases()
    batch = step_of(sizes, 0, max(sum(sizes), 1))
    train_step(
        engine, optimizer, batch, loss, StepPolicy(clip_norm=1.0, dtype=torch.float64), StepCallbacks(phases.lap)
    )
    assert phases.seen == expected


def test_the_outcome_is_this_ranks_sum_and_count() -> None:
    engine = parallelize(make_model(), SoloCommunicator(torch.device("cpu")))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.0)
    outcome = train_step(engine, optimizer, step_of([2, 3], 0, 5), CrossEntropy(None), StepPolicy(dtype=torch.float64))
    inputs, targets = data().take(torch.arange(5))
    logits = make_model()(inputs).reshape(-1, 7)
    expected = F.cross_entropy(logits, targets.reshape(-1), reduction="sum", ignore_index=IGNORED)
    torch.testing.assert_close(outcome.loss_sum, expected.detach(), rtol=0, atol=TOLERANCE)
    assert not outcome.loss_sum.requires_grad
    assert float(outcome.count) == int((targets != IGNORED).sum())
    assert (float(outcome.grad_norm) > 0, outcome.loss_scale) == (True, None)
    assert all(p.grad is None for p in engine.parameters())


def test_a_batch_is_placed_whole() -> None:
    """Floating point tensors change their dtype, others only their device, and what is no tensor stays."""
    batch = {"x": torch.ones(2), "y": (torch.arange(2), "label", np.float32(3.0))}
    placed = place(batch, torch.device("cpu"), torch.float64)
    assert placed["x"].dtype == torch.float64
    assert placed["y"][0].dtype == torch.int64
    assert placed["y"][1:] == ("label", np.float32(3.0))


@pytest.mark.parametrize("clip", [None, 1e9, 0.01])
def test_clipping_bounds_the_update(clip: float | None) -> None:
    def update(policy: StepPolicy) -> tuple[float, StepOutcome]:
        engine = parallelize(make_model(), SoloCommunicator(torch.device("cpu")))
        optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
        before = torch.cat([p.detach().reshape(-1).clone() for p in engine.parameters()])
        outcome = train_step(engine, optimizer, step_of([5], 0, 5), CrossEntropy(None), policy)
        after = torch.cat([p.detach().reshape(-1) for p in engine.parameters()])
        return float((after - before).norm()), outcome

    free, _ = update(StepPolicy(dtype=torch.float64))
    moved, outcome = update(StepPolicy(clip_norm=clip, dtype=torch.float64))
    assert float(outcome.grad_norm) == pytest.approx(free)  # measured also where nothing is clipped
    assert moved == pytest.approx(min(free, clip or free), rel=1e-4)


def test_an_error_in_the_loss_reaches_the_caller_and_the_next_step_is_whole() -> None:
    """The engine is not left in the state of the failed step."""

    class Fails(CrossEntropy):
        def __call__(self, model: Callable[..., Any], batch: Any) -> Any:
            super().__call__(model, batch)
            raise MemoryError("no room")

    engine = parallelize(make_model(), SoloCommunicator(torch.device("cpu")))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
    seen = watch(optimizer, engine.module)
    policy = StepPolicy(dtype=torch.float64)
    with pytest.raises(MemoryError):
        train_step(engine, optimizer, step_of([2, 3], 0, 5), Fails(None), policy)
    train_step(engine, optimizer, step_of([2, 3], 0, 5), CrossEntropy(None), policy)
    model = make_model()
    value = CrossEntropy(None)(model, data().take(torch.arange(5)))
    (value.total / value.count).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(seen[0][name], parameter.grad, rtol=0, atol=TOLERANCE)


SLOTS = {
    "the last is empty": [[2, 0]],
    "the first is empty": [[0, 2]],
    "two at the end": [[3, 0, 0]],
    "the last of one rank": [[1, 2], [1, 0]],
    "the last of both": [[1, 0], [2, 0]],
    "all of one rank": [[1, 2], [0, 0]],
}


@covering(
    always={"slots": ["the last of one rank"]},
    slots=SLOTS,
    strategy=["ddp", "zero1", "zero2", "fsdp"],
    precision=["fp32", "bf16_master"],
)
def test_slots_without_samples_are_sat_out_under_every_strategy(
    slots: list[list[int]], strategy: str, precision: str
) -> None:
    """Two steps, so that a gradient or an update that got lost shows in the second one."""
    total = sum(map(sum, slots))

    def train(comm: Communicator, sizes: list[list[int]], used: str) -> dict[str, torch.Tensor]:
        engine = parallelize(make_model().float(), comm, used, precision=precision)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.5, momentum=0.9, fused=True)
        start = sum(map(sum, sizes[: comm.rank]))
        for _ in range(2):
            train_step(engine, optimizer, step_of(sizes[comm.rank], start, total), CrossEntropy(5.0), StepPolicy())
        return engine.full_state_dict()

    whole = [[size for rank in slots for size in rank if size]]
    expected = train(SoloCommunicator(torch.device("cpu")), whole, "ddp")
    for found in run_virtual(lambda comm: train(comm, slots, strategy), len(slots)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
