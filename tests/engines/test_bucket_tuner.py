"""Buckets whose size is found in the first steps: training stays what it was, and ranks agree."""

from __future__ import annotations

import functools
from typing import Any

import engine_cases
import pytest
import torch
import torch.nn.functional as F
from engine_cases import MODELS, SHARES, Outcome, Recipe, assert_same, run_engine, run_single, sized
from gloo_pool import GlooPool
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.compress import Compressor
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.buckets.buckets import (
    BucketChoice,
    BucketPolicy,
    ParameterSize,
    bucket_parameters,
    probe_link,
    trial_policies,
)
from paceline.engines.ddp import DataParallel
from paceline.engines.groups import make_groups
from paceline.engines.precision import PRECISIONS
from paceline.plan.layout import Compression

SMALL = BucketPolicy(bucket_bytes=200, first_bucket_bytes=100)
BUCKETS = BucketPolicy(bucket_bytes=2**15, first_bucket_bytes=2**14)
NUM_PASSES = 9  # that measure
STEPS = NUM_PASSES + 3


def make_tuned(module: nn.Module, comm: Communicator, **options: Any) -> DataParallel:
    return DataParallel(module, make_groups(comm), sized(200, 100, tunes_buckets=True, **options))


@pytest.mark.some(1)
@pytest.mark.parametrize("case", ["branches", "tied", "reentrant", "odd shapes", "tiny", "frozen"])
def test_training_equals_one_process(case: str) -> None:
    recipe = Recipe(shares=SHARES["ragged"], steps=STEPS)
    expected = run_single(case, recipe)
    for outcome in run_engine(make_tuned, case, recipe):
        assert_same(outcome, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shares", [name for name in SHARES if not name.startswith("one")])
@pytest.mark.parametrize("case", MODELS)
def test_training_equals_one_process_in_all_cases(case: str, shares: str) -> None:
    recipe = Recipe(shares=SHARES[shares], steps=STEPS)
    expected = run_single(case, recipe)
    for outcome in run_engine(make_tuned, case, recipe):
        assert_same(outcome, expected)


def test_without_overlap() -> None:
    recipe = Recipe(shares=SHARES["accumulated"], steps=STEPS)
    expected = run_single("reused", recipe)
    for outcome in run_engine(lambda module, comm: make_tuned(module, comm, overlap=False), "reused", recipe):
        assert_same(outcome, expected)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(x))


def seeded() -> nn.Module:
    torch.manual_seed(1)
    return Wide()


def loss_of(engine: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(engine.comm.rank)
    x, y = torch.randn(8, 64, generator=generator), torch.randint(4, (8,), generator=generator)
    return F.cross_entropy(engine(x).float(), y)


def step(engine: Any) -> None:
    loss_of(engine).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(engine.parameters(), lr=0.1).step()
    for parameter in engine.parameters():
        parameter.grad = None


def wide(comm: Communicator, **options: Any) -> DataParallel:
    return DataParallel(seeded(), make_groups(comm), sized(2**15, 2**14, tunes_buckets=True), **options)


def replicas_are_equal(engine: DataParallel) -> bool:
    flat = torch.cat([parameter.detach().reshape(-1).double() for parameter in engine.parameters()])
    highest, lowest = flat.clone(), flat.clone()
    engine.comm.all_reduce(highest, "max").wait()
    engine.comm.all_reduce(lowest, "min").wait()
    return torch.equal(highest, lowest)


def test_the_choice_comes_once_and_is_the_same_on_all_ranks() -> None:
    def work(comm: Communicator) -> list[BucketChoice | None]:
        engine, choices = wide(comm), []
        for _ in range(NUM_PASSES + 2):
            step(engine)
            choices.append(engine.bucket_choice)
        assert replicas_are_equal(engine)
        return choices

    found = run_virtual(work, 3)
    assert found[0] == found[1] == found[2]
    assert found[0][: NUM_PASSES - 1] == [None] * (NUM_PASSES - 1)
    chosen = found[0][NUM_PASSES - 1]
    assert chosen is not None
    assert found[0][NUM_PASSES:] == [chosen] * 2
    assert all(value >= 0 for value in chosen.detail().values())


def test_measuring_costs_one_exchange_and_no_more_collectives_than_the_buckets_have() -> None:
    def work(comm: Communicator) -> list[dict[str, int]]:
        trace = Trace(comm.device)
        engine = wide(TracedCommunicator(comm, trace))
        counts = []
        for _ in range(NUM_PASSES + 2):
            trace.num_operations.clear()
            step(engine)
            counts.append(dict(trace.num_operations))
        assert engine.bucket_choice is not None
        assert counts[-1] == counts[-2] == {"all_reduce": engine.bucket_choice.num_buckets}
        return counts

    parameters = list(seeded().parameters())
    sizes = [ParameterSize(num_bytes=p.numel() * 4, kind="float32") for p in parameters]
    order = list(reversed(range(len(sizes))))
    trials = trial_policies(sum(size.num_bytes for size in sizes), BUCKETS)
    few, many = (len(bucket_parameters(sizes, order, policy)) for policy in trials)
    assert few < many
    for counts in run_virtual(work, 2):
        assert [count["all_reduce"] for count in counts[:NUM_PASSES]] == [few, many, few, many, few, *[many] * 4]
        assert [count.get("broadcast", 0) for count in counts] == [0, 0, 0, 0, 1, *[0] * 6]
        assert [count.get("all_gather", 0) for count in counts] == [*[0] * 8, 1, 0, 0]


def trained_parameters(comm: Communicator, compression: Compressor | None) -> torch.Tensor:
    engine = wide(comm, compression=compression)
    for _ in range(2 * STEPS):  # as many after the choice as before
        step(engine)
    assert engine.bucket_choice is not None
    assert replicas_are_equal(engine)
    return torch.cat([parameter.detach().reshape(-1) for parameter in engine.parameters()])


@functools.cache
def plain_parameters() -> torch.Tensor:
    return run_virtual(lambda comm: trained_parameters(comm, None), 2)[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("policy", ["topk", "powersgd", "int8"])
def test_compression_goes_with_it(policy: Any) -> None:
    """What a step did not send is not lost when buckets change: the sum of all updates stays near the plain one's."""

    def compressor() -> Compressor:
        return Compressor(Compression(policy=policy, min_size=64, ratio=0.25, factor_rank=2))

    plain = plain_parameters()
    start = torch.cat([parameter.detach().reshape(-1) for parameter in seeded().parameters()])
    (found, _) = run_virtual(lambda comm: trained_parameters(comm, compressor()), 2)
    assert float((found - plain).norm()) < 0.3 * float((plain - start).norm())


def test_masters_go_with_it() -> None:
    def work(comm: Communicator) -> bool:
        engine = wide(comm, precision=PRECISIONS["bf16_master"])
        for _ in range(NUM_PASSES + 2):
            step(engine)
        return engine.bucket_choice is not None and replicas_are_equal(engine)

    assert run_virtual(work, 2) == [True, True]


def test_gradients_that_are_kept_add_up_while_buckets_change() -> None:
    def add_up(engine: DataParallel) -> list[torch.Tensor | None]:
        for _ in range(NUM_PASSES + 2):  # no zero_grad: reduced gradients stay, and the next ones are added to them
            with engine.no_sync():
                loss_of(engine).backward()  # type: ignore[no-untyped-call]
            loss_of(engine).backward()  # type: ignore[no-untyped-call]
        assert (engine.bucket_choice is not None) == engine.layout.tunes_buckets
        return list(engine.full_gradients().values())

    tuned = run_virtual(lambda comm: add_up(wide(comm)), 2)
    plain = run_virtual(lambda comm: add_up(DataParallel(seeded(), make_groups(comm))), 2)
    for found, expected in zip(tuned, plain, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_pass_that_is_forgotten_begins_the_measuring_anew() -> None:
    def work(comm: Communicator) -> list[bool]:
        engine, has_choice = wide(comm), []
        for number in range(NUM_PASSES + 3):
            if number == 3:
                engine.forget_pass()
            step(engine)
            has_choice.append(engine.bucket_choice is not None)
        assert replicas_are_equal(engine)
        return has_choice

    assert run_virtual(work, 2) == [[False] * (NUM_PASSES + 2) + [True]] * 2


def test_a_choice_outlasts_what_is_learned_again() -> None:
    def work(comm: Communicator) -> bool:
        engine = wide(comm)
        for _ in range(NUM_PASSES):
            step(engine)
        before = engine.bucket_choice
        engine.forget_pass()
        for _ in range(2):
            step(engine)
        return engine.bucket_choice is before is not None and len(engine._arrivals.buckets) == before.num_buckets

    assert run_virtual(work, 2) == [True, True]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_virtual_ranks_keep_the_default(strategy: str) -> None:
    """Their times mean nothing, and a run on them is the same every time; through a trace, too."""

    def work(comm: Communicator) -> BucketChoice | None:
        engine = parallelize(Wide(), TracedCommunicator(comm, Trace(comm.device)), strategy, tunes_buckets=True)
        for _ in range(NUM_PASSES + 1):
            F.cross_entropy(engine(torch.ones(2, 64)), torch.tensor([0, 1])).backward()
        return engine.bucket_choice

    assert run_virtual(work, 2) == [None, None]


def train_on_real_ranks(comm: Communicator, strategy: str, case: str, recipe: Recipe) -> tuple[Outcome, Any]:
    made: list[Any] = []

    def make(module: nn.Module, inner: Communicator) -> Any:
        made.append(parallelize(module, inner, strategy, tunes_buckets=True, first_bucket_mb=1e-4))
        return made[0]

    outcome = engine_cases.train(comm, make, case, recipe)
    choice = made[0].bucket_choice
    return outcome, None if choice is None else (choice.policy, choice.link, choice.num_buckets)


@pytest.mark.some(1)
@pytest.mark.parametrize(("strategy", "shares"), [("ddp", "two ranks"), ("zero1", "two ranks"), ("zero2", "two ranks")])
def test_real_ranks(gloo_pool: GlooPool, strategy: str, shares: str) -> None:
    recipe, patience = Recipe(shares=SHARES[shares], steps=STEPS), {"group_timeout_s": 60.0, "timeout_s": 120.0}
    expected = run_single("tied", recipe)
    found = gloo_pool.run(train_on_real_ranks, strategy, "tied", recipe, ranks=recipe.ranks, **patience)
    for outcome, choice in found:
        assert_same(outcome, expected)
        assert choice is not None
        assert choice == found[0][1]


def test_a_link_is_tried_with_the_same_result_on_all_ranks() -> None:
    found = run_virtual(probe_link, 3)
    assert found[0] == found[1] == found[2]
    assert found[0].alpha_s >= 0
    assert found[0].bandwidth > 0
