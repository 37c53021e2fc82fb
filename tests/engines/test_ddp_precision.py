"""Data parallelism in mixed precision: several ranks against one of the same policy, and what masters are."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from engine_cases import sized
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.data.datasets import TensorPairs
from paceline.data.loader import TrainLoader
from paceline.data.order import DataOrder
from paceline.engines.ddp import DataParallel
from paceline.engines.groups import make_groups
from paceline.engines.precision import PRECISIONS, Precision
from paceline.errors import RankFailedError, UsageError
from paceline.train.loss import CrossEntropy
from paceline.train.step import StepPolicy, make_scaler, train_step

CPU = torch.device("cpu")
BF16 = torch.bfloat16
MASTER = PRECISIONS["bf16_master"]
POLICIES = {name: policy for name, policy in PRECISIONS.items() if name != "fp32"}


class Model(nn.Module):
    """An odd shape, a norm with statistics, a shared weight, a frozen one, and a part that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6).eval()
        self.mix = nn.Linear(6, 6)
        self.still = nn.Linear(6, 6)
        self.rare = nn.Linear(6, 6)
        self.still.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(tokens).mean(1))
        hidden = self.still(self.mix(hidden).tanh()) + hidden
        if tokens[0, 0] % 2:
            hidden = hidden + self.rare(hidden)
        return hidden @ self.table.weight.T


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return Model()


@functools.cache
def data() -> TensorPairs:
    generator = torch.Generator().manual_seed(6)
    return TensorPairs(torch.randint(11, (29, 5), generator=generator), torch.randint(11, (29,), generator=generator))


def make_engine(comm: Communicator, precision: Precision, model: nn.Module | None = None) -> DataParallel:
    return DataParallel(model or make_model(), make_groups(comm), sized(400, 100), precision)


def train(comm: Communicator, precision: Precision, *, parts: int, steps: int = 4) -> dict[str, torch.Tensor]:
    """Trains on global batches of 8, always cut into ``parts``; returns the state and the norms."""
    engine = make_engine(comm, precision)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.125, momentum=0.5, fused=True)
    scaler = make_scaler(precision, comm.device)
    order = DataOrder(length=29, global_batch=8, seed=1)
    loader = TrainLoader(data(), order, rank=comm.rank, ranks=comm.size, accumulate=parts // comm.size)
    norms = []
    for batch in loader.steps(0, steps):
        policy = StepPolicy(clip_norm=1.0)
        norms.append(train_step(engine, optimizer, batch, CrossEntropy(1.0), policy, scaler=scaler).grad_norm)
    return {**engine.full_state_dict(), "norms": torch.stack(norms)}


@pytest.mark.some(3)
@pytest.mark.parametrize("precision", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_process_of_the_same_policy_does(ranks: int, precision: Precision) -> None:
    """Every part of the batch gives the same half precision gradient anywhere; their fp32 sums differ by rounding."""
    expected = train(SoloCommunicator(CPU), precision, parts=4)
    assert expected["norms"].isfinite().all()
    for found in run_virtual(lambda comm: train(comm, precision, parts=4), ranks):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("precision", POLICIES.values(), ids=POLICIES)
def test_half_precision_is_not_full_precision(precision: Precision) -> None:
    """Guards the test above: the policy makes a difference that it would see, and yet a small one."""
    full = train(SoloCommunicator(CPU), PRECISIONS["fp32"], parts=4)["mix.weight"]
    half = train(SoloCommunicator(CPU), precision, parts=4)["mix.weight"]
    assert 1e-5 < float((full - half).abs().max()) < 1e-2


# Masters.


def loss_of(engine: DataParallel, start: int = 0, stop: int = 4) -> torch.Tensor:
    inputs, targets = data().take(torch.arange(start, stop))
    return nn.functional.cross_entropy(engine(inputs).float(), targets)


def test_the_module_holds_bf16_and_the_optimizer_gets_fp32_under_the_same_names() -> None:
    engine = make_engine(SoloCommunicator(CPU), MASTER)
    plain = make_model()
    for (name, master), (expected, original) in zip(engine.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(master, nn.Parameter)
        assert (name, master.shape, master.requires_grad) == (expected, original.shape, original.requires_grad)
        assert torch.equal(master, original)
    held = dict(engine.module.named_parameters())
    assert {name for name, p in held.items() if p.dtype is not BF16} == {"norm.weight", "norm.bias"}
    assert held["norm.weight"] is dict(engine.named_parameters())["norm.weight"]
    assert engine.module.norm.running_mean.dtype is torch.float32


def test_marks_of_the_users_reach_the_masters() -> None:
    model = make_model()
    model.mix.weight.is_special = True  # type: ignore[union-attr]
    engine = make_engine(SoloCommunicator(CPU), MASTER, model)
    assert [name for name, p in engine.named_parameters() if hasattr(p, "is_special")] == ["mix.weight"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_the_masters_and_the_modules_own_are_freed(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        engine = make_engine(comm, MASTER)
        for _ in range(2):  # before and after the buckets know the order of arrival
            loss_of(engine).backward()
            for name, parameter in engine.module.named_parameters():
                assert parameter.grad is None or parameter.dtype is torch.float32, name
            gradients = {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}
            assert set(gradients) >= {"table.weight", "mix.weight", "mix.bias", "norm.weight"}
            assert {g.dtype for g in gradients.values()} == {torch.float32}
            for parameter in engine.parameters():
                parameter.grad = None

    run_virtual(work, ranks)


def test_microbatches_add_up_in_the_masters_dtype() -> None:
    """The second gradient is far smaller than the distance of bf16 numbers at the first one's size."""
    engine = DataParallel(nn.Linear(1, 1, bias=False), make_groups(SoloCommunicator(CPU)), None, MASTER)
    (master,) = engine.parameters()
    with engine.no_sync():
        engine(torch.tensor([[256.0]])).backward()
    engine(torch.tensor([[0.5]])).backward()
    assert master.grad is not None
    assert master.grad.item() == 256.5
    assert torch.tensor(256.5, dtype=BF16).item() != 256.5


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_modules_parameters_follow_their_masters(ranks: int, fused: bool) -> None:
    """Also where the optimizer does not raise the version of what it updates, as fused ones do not."""

    def work(comm: Communicator) -> None:
        engine = make_engine(comm, MASTER)
        optimizer = torch.optim.SGD(engine.parameters(), lr=1.0, fused=fused)
        for _ in range(3):
            loss_of(engine).backward()
            before = engine.module.mix.weight.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(engine)
            master = dict(engine.named_parameters())["mix.weight"]
            assert torch.equal(engine.module.mix.weight, master.to(BF16))
            assert not torch.equal(engine.module.mix.weight, before)

    run_virtual(work, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_last_microbatch_that_is_sat_out_still_leads_to_new_parameters(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        engine = make_engine(comm, MASTER)
        optimizer = torch.optim.SGD(engine.parameters(), lr=1.0, fused=True)
        with engine.no_sync():
            loss_of(engine).backward()
        engine.join_pass()
        optimizer.step()
        with torch.no_grad():
            loss_of(engine)
        master = dict(engine.named_parameters())["mix.weight"]
        assert torch.equal(engine.module.mix.weight, master.to(BF16))

    run_virtual(work, ranks)


def test_scripts_with_the_older_names_of_an_engines_methods_still_run() -> None:
    def work(comm: Communicator) -> None:
        engine = make_engine(comm, MASTER)
        if comm.rank:
            engine.sit_out()  # or rank 0 would wait for its gradients
        else:
            loss_of(engine).backward()
        assert engine.lend_copies() == engine.fuse_cast() != {}

    run_virtual(work, 2)


def test_masters_that_a_user_writes_reach_the_module() -> None:
    engine = make_engine(SoloCommunicator(CPU), MASTER)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(0.25)
        loss_of(engine)
    assert all(bool((p == 0.25).all()) for p in engine.module.parameters())


def test_a_forward_between_two_others_and_their_backward_changes_nothing() -> None:
    """The cast before the third forward must not make autograd refuse what the second one saved."""

    def gradients(has_third: bool) -> list[torch.Tensor | None]:
        engine = make_engine(SoloCommunicator(CPU), MASTER)
        first, second = loss_of(engine), loss_of(engine, 4, 8)
        first.backward()
        if has_third:
            loss_of(engine)
        second.backward()
        return [parameter.grad for parameter in engine.parameters()]

    without = gradients(has_third=False)
    assert any(gradient is not None for gradient in without)
    torch.testing.assert_close(gradients(has_third=True), without, rtol=0, atol=0)


def test_states_hold_the_masters_and_fill_both() -> None:
    source = make_engine(SoloCommunicator(CPU), MASTER)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.3)
    loss_of(source).backward()
    optimizer.step()
    state = source.full_state_dict()
    assert {name: v.dtype for name, v in state.items()} == {n: v.dtype for n, v in make_model().state_dict().items()}
    assert not torch.equal(state["mix.weight"], state["mix.weight"].to(BF16).float())  # digits that bf16 has not
    target = make_engine(SoloCommunicator(CPU), MASTER, Model())
    target.load_full_state_dict(state)
    for (name, ours), theirs in zip(target.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(target.module.mix.weight, source.full_state_dict()["mix.weight"].to(BF16))
    plain = make_model()
    plain.load_state_dict(state)  # one process without masters goes on from it


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_unfrozen_later_gets_gradients_at_its_master(ranks: int) -> None:
    def work(comm: Communicator) -> bool:
        engine = make_engine(comm, MASTER)
        loss_of(engine).backward()
        engine.module.still.requires_grad_(True)
        loss_of(engine).backward()
        master = dict(engine.named_parameters())["still.weight"]
        return master.requires_grad and master.grad is not None and master.grad.dtype is torch.float32

    assert all(run_virtual(work, ranks))


@pytest.mark.parametrize("is_syncing", [True, False])
def test_a_gradient_with_a_graph_is_refused_where_it_would_be_reduced(is_syncing: bool) -> None:
    engine = make_engine(SoloCommunicator(CPU), MASTER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, about the cycle that such gradients make
        if is_syncing:
            with pytest.raises(UsageError, match="has a gradient with a graph"):
                loss_of(engine).backward(create_graph=True)
            return
        with engine.no_sync():
            loss_of(engine).backward(create_graph=True)
    weight = engine.module.mix.weight
    assert weight.grad is not None
    assert weight.grad.requires_grad


# Reduction in another dtype.


def test_gradients_can_travel_in_half_the_bytes() -> None:
    """A policy of the user's own: fp32 parameters, whose gradients are reduced in bf16."""
    own = Precision(name="own", reduce_dtype=BF16)

    def work(comm: Communicator, precision: Precision) -> tuple[dict[str, Any], float]:
        trace = Trace(CPU)
        engine = make_engine(TracedCommunicator(comm, trace), precision)
        for _ in range(2):
            for parameter in engine.parameters():
                parameter.grad = None
            before = trace.num_bytes["all_reduce"]
            loss_of(engine, 4 * comm.rank, 4 * comm.rank + 4).backward()
        return engine.full_gradients(), trace.num_bytes["all_reduce"] - before

    for (ours, half), (theirs, whole) in zip(
        run_virtual(lambda comm: work(comm, own), 2),
        run_virtual(lambda comm: work(comm, PRECISIONS["fp32"]), 2),
        strict=True,
    ):
        assert half * 2 == whole
        for name, gradient in theirs.items():
            if gradient is None:
                assert ours[name] is None
                continue
            assert ours[name].dtype is torch.float32
            torch.testing.assert_close(ours[name], gradient, rtol=2**-7, atol=2e-3)
            assert torch.equal(ours[name], ours[name].to(BF16).float())


def test_a_sparse_gradient_is_refused_by_masters_too() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))

    def work(comm: Communicator) -> None:
        engine = DataParallel(model, make_groups(comm), None, MASTER)
        engine(torch.tensor([1, 2])).float().sum().backward()

    with pytest.raises(RankFailedError, match="has a sparse gradient"):
        run_virtual(work, 1)
