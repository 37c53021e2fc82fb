"""Data parallelism with compressed gradients: it learns, replicas stay in step, and odd passes are right."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from measures.compression import sent_bytes
from paceline.comm.base import Communicator
from paceline.comm.compress import POLICIES, Compressor
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import UsageError
from paceline.plan.layout import Compression

RANKS = 2
CHOSEN = {
    "topk": {"ratio": 0.05},
    "randomk": {"ratio": 0.1},
    "threshold": {"threshold": 0.02},
    "powersgd": {"factor_rank": 2},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)
        self.never = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(hidden)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 16, generator=generator)
    return x, (x @ torch.randn(16, 4, generator=generator)).argmax(1)


def compressor(policy: str, **changes: Any) -> Compressor:
    return Compressor(Compression(**{"policy": policy, "min_size": 64, **CHOSEN.get(policy, {}), **changes}))


def build(comm: Communicator, compression: Compressor | None, **options: Any) -> Engine:
    torch.manual_seed(3)
    return parallelize(Net(), comm, bucket_mb=0.004, first_bucket_mb=0.001, compressor=compression, **options)


def final_loss(comm: Communicator, compression: Compressor | None, steps: int = 60, lr: float = 0.2) -> float:
    """Trains, and checks that the replicas are the same; returns the loss over all data."""
    engine = build(comm, compression)
    optimizer = torch.optim.SGD(engine.parameters(), lr=lr)
    x, y = data()
    for _ in range(steps):
        F.cross_entropy(engine(x[comm.rank :: comm.size]), y[comm.rank :: comm.size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = F.cross_entropy(engine.module(x), y)
    for parameter in engine.parameters():
        highest, lowest = parameter.detach().clone(), parameter.detach().clone()
        comm.all_reduce(highest, "max").wait()
        comm.all_reduce(lowest, "min").wait()
        assert torch.equal(highest, lowest)
    return float(loss)


@pytest.fixture(scope="module")
def plain_loss() -> float:
    return run_virtual(lambda comm: final_loss(comm, None), RANKS)[0]


KINDS = ("topk", "powersgd", "int8", "bf16")  # one of each: sparse, low rank, quantised, cast


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "policy", [each if each in KINDS else pytest.param(each, marks=pytest.mark.exhaustive) for each in POLICIES]
)
def test_it_learns_as_well_as_without(policy: str, plain_loss: float) -> None:
    (found, *_) = run_virtual(lambda comm: final_loss(comm, compressor(policy)), RANKS)
    assert found < plain_loss + 0.1
    assert plain_loss < 0.35


def test_without_error_feedback_the_difference_shows(plain_loss: float) -> None:
    def work(comm: Communicator, feedback: bool) -> float:
        return final_loss(comm, compressor("topk", ratio=0.01, error_feedback=feedback))

    (kept, *_) = run_virtual(lambda comm: work(comm, True), RANKS)
    (lost, *_) = run_virtual(lambda comm: work(comm, False), RANKS)
    assert lost - plain_loss > 3 * abs(kept - plain_loss)


def third_gradients(comm: Communicator, policy: str, overlap: bool) -> dict[str, torch.Tensor | None]:
    """Gradients of the third pass: by then some are owed from the passes before."""
    engine = build(comm, compressor(policy), overlap=overlap)
    x, y = data()
    for _ in range(3):
        engine.module.zero_grad()
        F.cross_entropy(engine(x[comm.rank :: comm.size]), y[comm.rank :: comm.size]).backward()
    return engine.full_gradients()


@functools.cache
def expected_gradients(policy: str) -> dict[str, torch.Tensor | None]:
    return run_virtual(lambda comm: third_gradients(comm, policy, False), RANKS)[0]


@pytest.mark.parametrize("policy", ["topk", "powersgd", "threshold"])
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_changes_nothing(policy: str, overlap: bool) -> None:
    expected = expected_gradients(policy)
    found = run_virtual(lambda comm: third_gradients(comm, policy, overlap), RANKS)[0]
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None) == name.startswith("never")
        assert gradient is None or other is None or torch.equal(gradient, other)


def test_accumulation_compresses_the_sum_once() -> None:
    def work(comm: Communicator) -> tuple[dict[str, Any], dict[str, Any], int]:
        x, y = data()
        x, y = x[comm.rank :: comm.size], y[comm.rank :: comm.size]
        whole, cut = compressor("topk"), compressor("topk")
        one, many = build(comm, whole), build(comm, cut)
        for _ in range(2):
            one.module.zero_grad()
            many.module.zero_grad()
            F.cross_entropy(one(x), y).backward()
            for number in range(4):
                with many.no_sync() if number < 3 else contextlib.nullcontext():
                    (F.cross_entropy(many(x[number::4]), y[number::4]) / 4).backward()
        cut.apply_ended_pass()
        return one.full_gradients(), many.full_gradients(), cut.step

    for one, many, steps in run_virtual(work, 2):
        assert steps == 2
        for name, gradient in one.items():
            if gradient is not None:
                torch.testing.assert_close(gradient, many[name], rtol=1e-4, atol=1e-6)


def test_a_rank_without_samples_sends_what_it_owes() -> None:
    def work(comm: Communicator) -> tuple[float, float, list[torch.Tensor]]:
        chosen = compressor("topk")
        engine = build(comm, chosen)
        x, y = data()
        F.cross_entropy(engine(x[comm.rank :: 2]), y[comm.rank :: 2]).backward()
        before = chosen.residual_norm()
        engine.module.zero_grad()
        if comm.rank == 0:
            F.cross_entropy(engine(x[:8]), y[:8]).backward()
        else:
            engine.join_pass()
        return before, chosen.residual_norm(), [g for g in engine.full_gradients().values() if g is not None]

    (_, _, first), (before, after, second) = run_virtual(work, 2)
    assert 0 < after < before
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Branches(nn.Module):
    """Two weights, of which a step uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16, bias=False)
        self.b = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor, names: str) -> Any:
        return sum(getattr(self, name)(x) for name in names)


def test_what_is_owed_to_a_parameter_waits_until_a_rank_uses_it() -> None:
    def work(comm: Communicator) -> None:
        chosen = compressor("topk", ratio=0.1)
        torch.manual_seed(0)
        engine = parallelize(Branches(), comm, compressor=chosen)
        x = data()[0][comm.rank :: 2]
        engine(x, "ab").square().mean().backward()
        chosen.apply_ended_pass()
        owed = {name: residual.clone() for name, residual in chosen.residuals.items()}
        assert owed["b.weight"].norm() > 0
        engine.module.zero_grad()
        engine(x, "a").square().mean().backward()
        assert engine.full_gradients()["b.weight"] is None
        chosen.apply_ended_pass()
        assert torch.equal(chosen.residuals["b.weight"], owed["b.weight"])
        assert not torch.equal(chosen.residuals["a.weight"], owed["a.weight"])
        engine.module.zero_grad()
        engine(x, "a" if comm.rank == 0 else "b").square().mean().backward()
        assert engine.full_gradients()["b.weight"] is not None

    run_virtual(work, 2)


def test_a_failed_pass_that_runs_again_leaves_no_trace() -> None:
    def work(comm: Communicator, fails: bool) -> dict[str, torch.Tensor | None]:
        torch.manual_seed(3)
        engine = parallelize(Net(), comm, first_bucket_mb=25, compressor=compressor("topk"))  # one bucket
        x, y = data()
        x, y = x[comm.rank :: 2], y[comm.rank :: 2]
        for step in range(3):
            if fails and step in (0, 2):
                F.cross_entropy(engine(x[:5]), y[:5]).backward()
                for parameter in engine.parameters():
                    parameter.grad = None
                engine.forget_pass()  # type: ignore[attr-defined]
            engine.module.zero_grad()
            F.cross_entropy(engine(x), y).backward()
        return engine.full_gradients()

    straight = run_virtual(lambda comm: work(comm, False), 2)[0]
    again = run_virtual(lambda comm: work(comm, True), 2)[0]
    for name, gradient in straight.items():
        other = again[name]
        assert (gradient is None) == (other is None)
        assert gradient is None or other is None or torch.equal(gradient, other)


def test_masters_are_compressed_as_well() -> None:
    def work(comm: Communicator) -> float:
        chosen = compressor("int8")
        engine = build(comm, chosen, precision="bf16_master")
        x, y = data()
        F.cross_entropy(engine(x[comm.rank :: 2]).float(), y[comm.rank :: 2]).backward()
        assert all(residual.dtype == torch.float32 for residual in chosen.residuals.values())
        return chosen.residual_norm()

    assert all(norm > 0 for norm in run_virtual(work, 2))


@pytest.mark.parametrize(("ratio", "least"), [(0.01, 45), (0.001, 400)])
def test_top_k_sends_that_many_times_fewer_bytes_than_plain_data_parallelism(ratio: float, least: float) -> None:
    """What the tracer saw of one step, indices, flags and all."""

    def work(comm: Communicator, chosen: Compressor | None) -> float:
        torch.manual_seed(0)
        traced = TracedCommunicator(comm, Trace(comm.device))
        engine = parallelize(nn.Linear(1024, 1024, bias=False), traced, compressor=chosen)
        engine(torch.randn(2, 1024)).square().mean().backward()  # agrees on the order too
        before = sent_bytes(traced)
        engine.module.zero_grad()
        engine(torch.randn(2, 1024)).square().mean().backward()
        return sent_bytes(traced) - before

    (plain, _) = run_virtual(lambda comm: work(comm, None), 2)
    (small, _) = run_virtual(lambda comm: work(comm, compressor("topk", ratio=ratio)), 2)
    assert 4 * 2**20 <= plain <= 4 * 2**20 + 1024
    assert plain / small >= least


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_sharded_strategies_refuse_it(strategy: str) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=f"compression.policy = topk with strategy = {strategy}"):
            parallelize(Net(), comm, strategy, compressor=compressor("topk"))

    run_virtual(work, 2)
