"""Hybrid sharding with compressed gradients between the replicas: slices, what they owe, and who knows of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compression_states import Saved, saved
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.compress import POLICIES, Compressor
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.flat.shard import ShardGradients
from paceline.engines.fsdp import FullySharded
from paceline.plan.layout import Compression

RANKS, SHARDS = 4, 2
ROUNDING = {"fp16": 1e-3, "bf16": 1e-2}  # messages are added up in their own dtype, and that rounding is nobody's


class Net(nn.Module):
    """Odd sizes, so that slices begin and end inside rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 37)
        self.norm = nn.LayerNorm(37)
        self.second = nn.Linear(37, 29)
        self.last = nn.Linear(29, 5)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(hidden)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 13, generator=generator, dtype=torch.float64)
    return x, (x @ torch.randn(13, 5, generator=generator, dtype=torch.float64)).argmax(1)


def compressor(policy: str, **changes: Any) -> Compressor:
    values = {"policy": policy, "min_size": 64, "ratio": 0.1, "factor_rank": 2, "threshold": 0.01}
    return Compressor(Compression(**{**values, **changes}))


def build(comm: Communicator, compression: Compressor | None, strategy: str = "hybrid") -> FullySharded:
    torch.manual_seed(3)
    options = {"shard_ranks": SHARDS, "units": ("first", "second")} if strategy == "hybrid" else {}
    engine: Any = parallelize(Net().double(), comm, strategy, compressor=compression, **options)
    return engine


def backward(engine: FullySharded, step: int) -> dict[str, torch.Tensor]:
    """Makes the gradients of one step, of samples that differ by step and rank, and returns them whole."""
    x, y = data()
    mine = slice(step * 4 + engine.comm.rank, None, 2 * engine.comm.size)
    for parameter in engine.parameters():
        parameter.grad = None
    F.cross_entropy(engine(x[mine]), y[mine]).backward()
    return {name: gradient for name, gradient in engine.full_gradients().items() if gradient is not None}


def residuals(state: Saved) -> dict[str, torch.Tensor]:
    """Returns what is owed, with a row for each replica."""
    return {name: state.read(f"residual/{name}") for name in state.shapes("residual/")}


def owed(state: Saved) -> dict[str, torch.Tensor]:
    """Returns what all replicas owe the model together."""
    return {name: rows.mean(0) for name, rows in residuals(state).items()}


@pytest.mark.some(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_sent_and_what_is_owed_add_up_to_the_gradients(policy: str) -> None:
    steps = 3

    def work(comm: Communicator) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]], Saved]:
        chosen = compressor(policy)
        plain, engine = build(comm, None), build(comm, chosen)
        exact = [backward(plain, step) for step in range(steps)]
        sent = [backward(engine, step) for step in range(steps)]
        return exact, sent, saved(comm, chosen)

    results = run_virtual(work, RANKS)
    exact, sent, state = results[0]
    for _, other, _ in results[1:]:  # gathered from the slices of another replica: the same bits
        assert all(torch.equal(other[step][name], sent[step][name]) for step in range(steps) for name in sent[0])
    missing = owed(state)
    assert {"first.weight", "second.weight"} <= set(missing)
    assert all(len(rows) == RANKS // SHARDS for rows in residuals(state).values())
    for name in exact[0]:
        given = torch.stack([each[name] for each in exact]).sum(0)
        found = torch.stack([each[name] for each in sent]).sum(0)
        if name in missing:
            found = found + missing[name].view_as(found)
        torch.testing.assert_close(found, given, rtol=0, atol=ROUNDING.get(policy, 1e-9))


def test_with_all_elements_sent_it_is_the_plain_average() -> None:
    def work(comm: Communicator) -> None:
        plain, engine = build(comm, None), build(comm, compressor("topk", ratio=1.0))
        for step in range(2):
            expected, found = backward(plain, step), backward(engine, step)
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)

    run_virtual(work, RANKS)


@pytest.mark.parametrize("policy", ["topk", "powersgd"])
def test_a_run_goes_on_exactly_from_its_state(policy: str) -> None:
    def work(comm: Communicator) -> None:
        whole, first, second = (compressor(policy) for _ in range(3))
        engine, before, after = build(comm, whole), build(comm, first), build(comm, second)
        expected = [backward(engine, step) for step in range(4)][-1]
        for step in range(2):
            backward(before, step)
        second.load(saved(comm, first), first.step, comm)
        found = [backward(after, step) for step in (2, 3)][-1]
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    run_virtual(work, RANKS)


@pytest.mark.parametrize("plain_steps", [0, 1])
def test_memory_between_the_tensors_of_a_bucket_is_not_taken_for_a_gradient(
    plain_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that travels whole was judged with its padding: a step was taken for one that is left out."""
    make = ShardGradients.new_buffer
    monkeypatch.setattr(ShardGradients, "new_buffer", lambda gradients: make(gradients).fill_(torch.nan))

    def work(comm: Communicator) -> None:
        chosen = compressor("powersgd", plain_steps=plain_steps)
        engine = build(comm, chosen)
        for step in range(2):
            backward(engine, step)
        # Both steps count, so that something is owed.
        assert set(residuals(saved(comm, chosen))) == {"first.weight", "second.weight", "last.weight"}

    run_virtual(work, RANKS)


@pytest.mark.some(1)
@pytest.mark.parametrize("policy", ["topk", "powersgd"])
@pytest.mark.parametrize(("before", "after"), [("hybrid", "ddp"), ("ddp", "hybrid")])
def test_the_other_strategy_owes_the_same(policy: str, before: str, after: str) -> None:
    def first(comm: Communicator) -> Saved:
        chosen = compressor(policy)
        engine = build(comm, chosen, before)
        for step in range(2):
            backward(engine, step)
        return saved(comm, chosen)

    state = run_virtual(first, RANKS)[0]

    def second(comm: Communicator) -> tuple[Saved, Saved, dict[str, torch.Tensor]]:
        chosen = compressor(policy)
        engine = build(comm, chosen, after)
        chosen.load(state, 2, comm)
        loaded = saved(comm, chosen)
        sent = backward(engine, 2)
        return loaded, saved(comm, chosen), sent

    loaded, later, sent = run_virtual(second, RANKS)[0]
    given = run_virtual(lambda comm: backward(build(comm, None), 2), RANKS)[0]
    for name, before_it in owed(state).items():
        torch.testing.assert_close(owed(loaded)[name], before_it)
        total = sent[name].reshape(-1) + owed(later)[name]
        torch.testing.assert_close(total, given[name].reshape(-1) + before_it, rtol=0, atol=1e-9)


def test_a_bad_gradient_leaves_no_trace() -> None:
    def work(comm: Communicator) -> float:
        chosen = compressor("topk")
        engine = build(comm, chosen)
        backward(engine, 0)
        chosen.apply_ended_pass()
        before = {name: residual.clone() for name, residual in chosen.residuals.items()}
        hook = engine.module.register_forward_hook(lambda _module, _args, output: output * torch.nan)
        backward(engine, 1)
        hook.remove()
        chosen.apply_ended_pass()
        assert all(torch.equal(chosen.residuals[name], before[name]) for name in before)
        return chosen.residual_norm()

    assert all(norm > 0 for norm in run_virtual(work, RANKS))


def test_shards_tell_one_another_of_what_only_one_of_them_saw() -> None:
    def work(comm: Communicator) -> list[float]:
        chosen = compressor("topk")
        engine = build(comm, chosen)
        backward(engine, 0)
        chosen.apply_ended_pass()
        before = {name: residual.clone() for name, residual in chosen.residuals.items()}
        if comm.rank % SHARDS == 1:  # as if a gradient had run over in this slice
            real = chosen.end_pass

            def end_pass(shards: Communicator | None = None) -> None:
                assert chosen.current.is_finite is not None
                chosen.current.is_finite.zero_()
                real(shards)

            chosen.end_pass = end_pass  # type: ignore[method-assign]
        backward(engine, 1)
        chosen.apply_ended_pass()
        return [float((chosen.residuals[name] - before[name]).norm()) for name in before]

    assert all(change == 0 for changes in run_virtual(work, RANKS) for change in changes)


def test_only_the_replicas_get_fewer_bytes() -> None:
    def work(comm: Communicator, policy: str | None) -> dict[str, int]:
        trace = Trace(comm.device)
        chosen = None if policy is None else compressor(policy, ratio=0.01)
        engine = build(TracedCommunicator(comm, trace), chosen)
        backward(engine, 0)
        before = dict(trace.num_bytes)
        backward(engine, 1)
        return {kind: number - before.get(kind, 0) for kind, number in trace.num_bytes.items()}

    def both_shards(policy: str | None) -> Counter[str]:
        first, second, *_ = run_virtual(lambda comm: work(comm, policy), RANKS)
        return Counter(first) + Counter(second)

    plain, small = both_shards(None), both_shards("topk")
    assert small["reduce_scatter"] == plain["reduce_scatter"] > 0
    saved = plain["all_reduce"] - small["all_reduce"]
    weights = 8 * (13 * 37 + 37 * 29 + 29 * 5)
    assert weights <= saved <= 1.25 * weights  # the padding is not sent either
    gathered = small["all_gather"] - plain["all_gather"]  # the messages of two replicas
    assert 0 < gathered < saved / 10


def test_a_pass_that_is_forgotten_leaves_no_trace() -> None:
    def work(comm: Communicator, forgets: bool) -> dict[str, torch.Tensor]:
        engine = build(comm, compressor("topk"))
        backward(engine, 0)
        if forgets:
            backward(engine, 3)
            engine.forget_pass()
        return backward(engine, 1)

    straight = run_virtual(lambda comm: work(comm, False), RANKS)[0]
    again = run_virtual(lambda comm: work(comm, True), RANKS)[0]
    assert all(torch.equal(straight[name], again[name]) for name in straight)


def test_what_is_owed_to_a_frozen_parameter_waits() -> None:
    def work(comm: Communicator) -> None:
        chosen = compressor("topk")
        engine = build(comm, chosen)
        backward(engine, 0)
        chosen.apply_ended_pass()
        before = {name: residual.clone() for name, residual in chosen.residuals.items()}
        dict(engine.named_parameters())["second.weight"].requires_grad_(False)
        assert "second.weight" not in backward(engine, 1)
        chosen.apply_ended_pass()
        for name, residual in before.items():
            assert torch.equal(chosen.residuals[name], residual) == (name == "second.weight")

    run_virtual(work, RANKS)
