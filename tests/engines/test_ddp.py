"""Data parallelism against one process: the checklist that every engine passes."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from engine_cases import (
    BATCH,
    Branches,
    Checkpointed,
    Convolutional,
    Frozen,
    OddShapes,
    Plain,
    Reentrant,
    Reused,
    SeveralOutputs,
    Tied,
    Unused,
    build,
    data,
    summed_loss,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.ddp import DataParallel
from paceline.errors import RankFailedError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Offload

TOLERANCE = 1e-12

MODELS: list[type[nn.Module]] = [
    Plain,
    Tied,
    Frozen,
    Unused,
    Reused,
    OddShapes,
    Reentrant,
    Checkpointed,
    SeveralOutputs,
    Convolutional,
]


def snapshot(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


History = list[tuple[dict[str, Any], float, dict[str, torch.Tensor]]]


def reference(model: type[nn.Module], *, steps: int, clip: float | None) -> History:
    module = build(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)
    history: History = []
    for step in range(steps):
        inputs, targets = data(step)
        x = inputs.requires_grad_(model is Reentrant)
        (summed_loss(module(x), targets) / BATCH).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), clip) if clip else torch.zeros(())
        grads = snapshot(module)
        optimizer.step()
        optimizer.zero_grad()
        history.append((grads, float(norm), copy.deepcopy(module.state_dict())))
    return history


def distributed(
    comm: Communicator, model: type[nn.Module], *, steps: int, clip: float | None, shares: list[list[int]]
) -> History:
    """Trains with microbatches of ``shares[rank]`` samples; a rank without samples only joins the reduction."""
    engine = parallelize(build(model), comm, bucket_mb=1e-4, first_bucket_mb=5e-5)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.05, weight_decay=0.1)
    engine.check_optimizer(optimizer)
    start = sum(sum(share) for share in shares[: comm.rank])
    history: History = []
    for step in range(steps):
        inputs, targets = data(step)
        scale = engine.loss_scale(sum(shares[comm.rank]))
        train_microbatches(engine, inputs, targets, scale, start, shares[comm.rank], needs_grad=model is Reentrant)
        norm = engine.clip_grad_norm_(clip) if clip else torch.zeros(())
        grads = snapshot(engine.module)
        optimizer.step()
        optimizer.zero_grad()
        history.append((grads, float(norm), engine.full_state_dict()))
    return history


def train_microbatches(
    engine: DataParallel,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    start: int,
    share: list[int],
    *,
    needs_grad: bool,
) -> None:
    pieces = [size for size in share if size]
    for number, size in enumerate(pieces):
        x = inputs[start : start + size].requires_grad_(needs_grad)
        y = targets[start : start + size]
        if number < len(pieces) - 1:
            with engine.no_sync():
                (summed_loss(engine(x), y) * scale).backward()
        else:
            (summed_loss(engine(x), y) * scale).backward()
        start += size
    if not pieces:
        engine.join_pass()


def assert_same(ours: History, theirs: History) -> None:
    assert len(ours) == len(theirs)
    for step, ((grads, norm, state), (ref_grads, ref_norm, ref_state)) in enumerate(zip(ours, theirs, strict=True)):
        assert norm == pytest.approx(ref_norm, abs=TOLERANCE)
        for name, gradient in ref_grads.items():
            if gradient is None:
                assert grads[name] is None, f"step {step}: {name} must keep no gradient"
            else:
                torch.testing.assert_close(grads[name], gradient, rtol=0, atol=TOLERANCE, msg=f"step {step}: {name}")
        for name, value in ref_state.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10, msg=f"step {step}: {name}")


SHARES = {
    "one rank": [[12]],
    "even": [[4], [4], [4]],
    "ragged": [[1], [6], [5]],
    "accumulated": [[2, 2], [3, 1], [2, 2]],
    "ragged accumulation": [[1, 2, 3], [4], [1, 1]],
    "a rank without samples": [[5], [0], [7]],
}


@pytest.mark.some(6)
@covering(always={"shares": ["ragged accumulation"]}, model=MODELS, shares=SHARES)
def test_training_equals_one_process(model: type[nn.Module], shares: list[list[int]]) -> None:
    expected = reference(model, steps=4, clip=0.5)
    results = run_virtual(lambda comm: distributed(comm, model, steps=4, clip=0.5, shares=shares), ranks=len(shares))
    for history in results:
        assert_same(history, expected)


def test_without_clipping() -> None:
    expected = reference(Tied, steps=3, clip=None)
    for history in run_virtual(lambda c: distributed(c, Tied, steps=3, clip=None, shares=[[6], [6]]), ranks=2):
        assert_same(history, expected)


@pytest.mark.parametrize(
    "branches", [["left", "right"], ["left", "none"], ["none", "none"], ["right", "right"]], ids=str
)
def test_rank_dependent_branches(branches: list[str]) -> None:
    single = build(Branches)
    inputs, targets = data(0)
    halves = inputs.split(6), targets.split(6)
    loss = sum(summed_loss(single(x, b), y) for x, y, b in zip(*halves, branches, strict=True)) / BATCH
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    expected = snapshot(single)

    def work(comm: Communicator) -> list[dict[str, torch.Tensor | None]]:
        engine = parallelize(build(Branches), comm, bucket_mb=1e-4, first_bucket_mb=5e-5)
        grads = []
        for warm_up in (["left", "right"], branches, ["right", "left"], branches):
            engine.module.zero_grad()
            output = engine(halves[0][comm.rank], warm_up[comm.rank])
            (summed_loss(output, halves[1][comm.rank]) * engine.loss_scale(6)).backward()
            grads.append(snapshot(engine.module))
        return [grads[1], grads[3]]

    for grads in (g for per_rank in run_virtual(work, ranks=2) for g in per_rank):
        for name, gradient in expected.items():
            if gradient is None:
                assert grads[name] is None, name
            else:
                torch.testing.assert_close(grads[name], gradient, rtol=0, atol=TOLERANCE)


def test_gradients_are_views_into_the_bucket() -> None:
    def work(comm: Communicator) -> tuple[bool, int]:
        engine = parallelize(build(Plain), comm)
        for _ in range(2):
            engine(data(0)[0]).sum().backward()
        storages = {p.grad.untyped_storage().data_ptr() for p in engine.parameters() if p.grad is not None}
        return len(storages) == 1, len(engine._arrivals.buckets)

    assert run_virtual(work, ranks=2) == [(True, 1), (True, 1)]


def test_a_gradient_alone_in_its_bucket_is_reduced_where_it_lies() -> None:
    """A parameter over the bucket's limit: no copy in, no copy out."""

    def work(comm: VirtualCommunicator) -> tuple[list[int], list[int]]:
        reduced: list[int] = []
        all_reduce = comm.all_reduce
        comm.all_reduce = lambda t, op="sum": (reduced.append(t.data_ptr()), all_reduce(t, op))[1]  # type: ignore[method-assign]
        engine = parallelize(build(Plain), comm, bucket_mb=1e-6, first_bucket_mb=1e-6)
        for _ in range(2):
            engine.module.zero_grad()
            reduced.clear()
            engine(data(0)[0]).sum().backward()
        return reduced, [p.grad.data_ptr() for p in engine.parameters() if p.grad is not None]

    for reduced, gradients in run_virtual(work, ranks=2):
        assert len(reduced) == 4
        assert set(reduced) == set(gradients)


def test_count_and_bytes_of_collectives() -> None:
    """Per step: one all-reduce a bucket, gradients and one flag a parameter on the wire, nothing else."""

    def work(comm: Communicator) -> tuple[dict[str, int], dict[str, int], int]:
        traced = TracedCommunicator(comm, Trace(comm.device))
        engine = parallelize(build(Plain), traced)
        engine(data(0)[0]).sum().backward()  # the first step watches and agrees on the order
        traced.trace.num_operations.clear()
        traced.trace.num_bytes.clear()
        engine(data(0)[0]).sum().backward()
        return (
            dict(traced.trace.num_operations),
            dict(traced.trace.num_bytes),
            engine._arrivals.buckets[-1].layout.length * 8,
        )

    for operations, num_bytes, expected in run_virtual(work, ranks=2):
        assert operations == {"all_reduce": 1}
        assert num_bytes == {"all_reduce": expected}


def test_buckets_leave_while_backward_runs() -> None:
    """From the second step on, a bucket is on its way before earlier layers have their gradients."""

    def work(comm: VirtualCommunicator) -> list[str]:
        events: list[str] = []
        engine = parallelize(build(Plain), comm, bucket_mb=1e-4, first_bucket_mb=1e-4)
        launch = engine._launch
        engine._launch = lambda bucket: (events.append("launch"), launch(bucket))[1]  # type: ignore[method-assign]
        for _ in range(2):
            events.clear()
            output = engine(data(0)[0])
            hook = engine.module.get_submodule("first").weight.register_hook(lambda _: events.append("first layer"))
            output.sum().backward()
            hook.remove()
        return events

    for events in run_virtual(work, ranks=2):
        assert events.index("launch") < events.index("first layer")


def test_zeroing_in_place_keeps_views() -> None:
    """``zero_grad(set_to_none=False)`` accumulates straight into the buckets."""
    expected = reference(Plain, steps=1, clip=None)[0][0]

    def work(comm: Communicator) -> tuple[dict[str, torch.Tensor | None], bool]:
        engine = parallelize(build(Plain), comm)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.0)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            x, y = (t.split(6)[comm.rank] for t in data(0))
            (summed_loss(engine(x), y) * engine.loss_scale(6)).backward()
        bucket = engine._arrivals.buckets[0]
        return snapshot(engine.module), all(p.grad is v for p, v in zip(bucket.parameters, bucket.views, strict=True))

    for grads, are_views in run_virtual(work, ranks=2):
        assert are_views
        for name, gradient in expected.items():
            torch.testing.assert_close(grads[name], gradient, rtol=0, atol=TOLERANCE)


def test_initial_values_are_those_of_rank_0() -> None:
    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        torch.manual_seed(comm.rank)
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        module[1].get_buffer("running_mean").fill_(comm.rank)
        return parallelize(module, comm).full_state_dict()

    first, second = run_virtual(work, ranks=2)
    for name, value in first.items():
        assert torch.equal(value, second[name])


@pytest.mark.parametrize("policy", ["broadcast", "local"])
def test_buffer_policy(policy: Any) -> None:
    def work(comm: Communicator) -> torch.Tensor:
        module = nn.BatchNorm1d(2)
        engine = parallelize(module, comm, buffers=policy, sync_batchnorm=False)
        for _ in range(2):
            engine(torch.full((4, 2), float(comm.rank + 1)) + torch.arange(4.0)[:, None]).sum().backward()
        engine.train()
        engine(torch.zeros(4, 2) + torch.arange(4.0)[:, None])
        return module.get_buffer("running_mean").clone()

    first, second = run_virtual(work, ranks=2)
    assert torch.equal(first, second) == (policy == "broadcast")


def test_a_rank_without_samples_shares_buffers_too() -> None:
    def work(comm: Communicator) -> torch.Tensor:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)).double()
        engine = parallelize(module, comm)
        for step in range(3):
            if comm.rank == 1 and step != 1:
                engine.join_pass()
            else:
                engine(data(step)[0]).sum().backward()
        return module[1].get_buffer("running_mean").clone()

    first, second = run_virtual(work, ranks=2)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_changes_no_numbers(overlap: bool) -> None:
    def work(comm: Communicator) -> dict[str, torch.Tensor | None]:
        engine = parallelize(build(Reused), comm, bucket_mb=1e-4, first_bucket_mb=5e-5, overlap=overlap)
        for _ in range(3):
            engine.module.zero_grad()
            x, y = (t.split(6)[comm.rank] for t in data(0))
            (summed_loss(engine(x), y) * engine.loss_scale(6)).backward()
        return snapshot(engine.module)

    expected = reference(Reused, steps=1, clip=None)[0][0]
    for grads in run_virtual(work, ranks=2):
        torch.testing.assert_close(grads, expected, rtol=0, atol=TOLERANCE)


def test_an_extra_arrival_is_refused_with_overlap_and_right_without() -> None:
    class Changing(Reentrant):
        num_uses = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x))
            for _ in range(self.num_uses):
                hidden = checkpoint(self.middle, torch.tanh(hidden), use_reentrant=True)
            return self.second(hidden)

    def work(comm: Communicator, overlap: bool) -> torch.Tensor:
        module = build(Changing)
        engine = parallelize(module, comm, overlap=overlap)
        for uses in (1, 1, 3):
            module.num_uses = uses  # type: ignore[assignment]
            module.zero_grad()
            engine(data(comm.rank)[0].requires_grad_()).sum().backward()
        gradient = module.get_submodule("middle").weight.grad
        assert isinstance(gradient, torch.Tensor)
        return gradient.clone()

    assert "overlap = false" in refusal(lambda comm: work(comm, overlap=True))
    first, second = run_virtual(lambda comm: work(comm, overlap=False), ranks=2)
    assert torch.equal(first, second)


def test_unfreezing_rebuilds_the_buckets() -> None:
    def work(comm: Communicator) -> list[bool]:
        engine = parallelize(build(Frozen), comm)
        engine(data(0)[0]).sum().backward()
        seen = [engine.module.get_submodule("first").weight.grad is not None]
        engine.module.get_submodule("first").weight.requires_grad_(True)
        engine.module.zero_grad()
        engine(data(comm.rank)[0]).sum().backward()
        gradient = engine.module.get_submodule("first").weight.grad
        assert isinstance(gradient, torch.Tensor)
        mean = gradient.clone()
        comm.all_reduce(mean, "avg").wait()
        return [*seen, torch.allclose(mean, gradient, atol=1e-14)]

    assert run_virtual(work, ranks=2) == [[False, True], [False, True]]


def test_a_failed_backward_does_not_poison_the_next() -> None:
    def work(comm: Communicator) -> dict[str, torch.Tensor | None]:
        engine = parallelize(build(Plain), comm)
        for attempt in range(3):
            engine.module.zero_grad()
            output = engine(data(0)[0])
            if attempt == 1:
                hook = engine.module.get_submodule("first").weight.register_hook(_raise)
                with pytest.raises(MemoryError):
                    output.sum().backward()
                hook.remove()
                continue
            output.sum().backward()
        return snapshot(engine.module)

    def _raise(_: torch.Tensor) -> None:
        raise MemoryError("no room")

    single = build(Plain)
    single(data(0)[0]).sum().backward()
    for grads in run_virtual(work, ranks=2):
        torch.testing.assert_close(grads, snapshot(single), rtol=0, atol=TOLERANCE)


def test_state_round_trip_into_another_world_size() -> None:
    def save(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = parallelize(build(Tied), comm)
        engine(data(0)[0]).sum().backward()
        torch.optim.SGD(engine.parameters(), lr=0.1).step()
        return engine.full_state_dict(rank0_only=True)

    states = run_virtual(save, ranks=3)
    assert states[1] == {}

    def load(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = parallelize(build(Tied), comm)
        engine.load_full_state_dict(states[0])
        return engine.full_state_dict()

    for state in run_virtual(load, ranks=2):
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


def refusal(work: Callable[[Communicator], Any], ranks: int = 2) -> str:
    with pytest.raises(RankFailedError) as failure:
        run_virtual(work, ranks=ranks)
    assert isinstance(failure.value.__cause__, UsageError)
    return str(failure.value.__cause__)


def test_refusals_name_the_problem_and_the_fix() -> None:
    shared = build(Plain)
    assert "each rank needs a module of its own" in refusal(lambda c: parallelize(shared, c))
    assert "sparse=False" in refusal(lambda c: parallelize(nn.Embedding(4, 2, sparse=True), c))
    assert "meta device" in refusal(lambda c: parallelize(nn.Linear(2, 2, device="meta"), c))
    different = refusal(lambda c: parallelize(nn.Linear(2, 2 + c.rank), c))
    assert "weight (2, 2)" in different
    assert "weight (3, 2)" in different
    with pytest.raises(UsageError, match=r"offload = \[optimizer\] with strategy = ddp"):
        parallelize(build(Plain), SoloCommunicator(torch.device("cpu")), offload=Offload(optimizer=True))
    with pytest.raises(UsageError, match="unknown"):
        parallelize(build(Plain), SoloCommunicator(torch.device("cpu")), strategy="dpp")


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    engine = parallelize(build(Plain), SoloCommunicator(torch.device("cpu")))
    wrong = torch.optim.SGD(build(Plain).parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"SGD\(engine.parameters\(\), ...\)"):
        engine.check_optimizer(wrong)


def test_double_differentiation_is_refused() -> None:
    def work(comm: Communicator) -> None:
        parallelize(build(Plain), comm)(data(0)[0]).sum().backward(create_graph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about create_graph, once in a process
        assert "no_sync" in refusal(work)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_compiled_blocks_keep_the_numbers_and_the_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and differentiated block by block (without code generation, which needs a compiler on the machine)."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def train(comm: Communicator, compiled: bool) -> tuple[dict[str, torch.Tensor | None], list[int]]:
        torch.manual_seed(0)
        model = GPT(gpt_config("gpt-nano", dropout=0.0, vocab_size=32, context=16)).double()
        engine = parallelize(model, comm, bucket_mb=0.1, first_bucket_mb=0.05, compile=compiled)
        arrived: list[int] = []
        launch = engine._launch
        engine._launch = lambda bucket: (arrived.append(sum(engine._arrivals.counts)), launch(bucket))[1]  # type: ignore[method-assign]
        for _ in range(2):
            arrived.clear()
            model.zero_grad()
            tokens = torch.arange(32).reshape(2, 16) if comm.rank else torch.arange(32).flip(0).reshape(2, 16)
            engine(tokens).logsumexp(-1).sum().backward()
        return snapshot(model), arrived

    plain = run_virtual(lambda comm: train(comm, compiled=False), ranks=2)[0][0]
    for gradients, arrived in run_virtual(lambda comm: train(comm, compiled=True), ranks=2):
        torch.testing.assert_close(gradients, plain, rtol=0, atol=1e-10)
        assert len(set(arrived)) > 2, "buckets must leave at different moments of backward"
