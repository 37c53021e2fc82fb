"""The engine benchmark on models of a few weights: what runs, what is compared with what, and that all arms agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.errors import TrainingError, UsageError
from paceline_bench import arms as arms_module
from paceline_bench.arms import (
    Arm,
    BenchWorkload,
    Wrapped,
    arms_alone,
    arms_in_bf16,
    arms_on_ranks,
    check_words,
    select,
    sets_of,
)
from paceline_bench.engines import MeasuredArm, _measure, bench_bf16, check_losses
from paceline_bench.timing import Turns

if TYPE_CHECKING:
    from gloo_pool import GlooPool

MLP = BenchWorkload(model="mlp", batch=4)
NANO = BenchWorkload(model="gpt-nano", batch=1, context=8)
SHORT = Turns(rounds=2, steps_per_turn=1, warm_up=3)
CPU = torch.device("cpu")


def test_every_arm_has_a_peer_among_the_arms() -> None:
    for arms in (arms_on_ranks(MLP, 2), arms_on_ranks(NANO, 4), arms_alone(), arms_in_bf16()):
        by_name = {arm.name: arm for arm in arms}
        assert len(by_name) == len(arms)
        assert all(by_name[arm.peer].set == arm.set for arm in arms)


def test_every_engine_is_there_with_the_peer_that_it_is_judged_by() -> None:
    peers = {arm.name: arm.peer for arm in arms_on_ranks(MLP, 4)}
    assert {name: peer for name, peer in peers.items() if name.startswith("paceline")} == {
        "paceline ddp": "torch ddp",
        "paceline zero1": "paceline ddp",
        "paceline zero2": "paceline ddp",
        "paceline fsdp": "torch fsdp2",
        "paceline hybrid": "torch fsdp2 hybrid",
        "paceline ddp shared memory": "torch ddp",
        "paceline zero1 shared memory": "paceline ddp shared memory",
        "paceline zero2 shared memory": "paceline ddp shared memory",
        "paceline fsdp shared memory": "torch fsdp2",
    }
    assert "paceline hybrid" not in {arm.name for arm in arms_on_ranks(MLP, 2)}
    assert "torch fsdp2 root only" not in {arm.name for arm in arms_on_ranks(NANO, 2)}


def test_words_select_arms_and_bring_their_peers() -> None:
    arms = arms_on_ranks(MLP, 2)
    assert [arm.name for arm in select(arms, ["zero1 shared"])] == [
        "torch ddp",
        "paceline ddp shared memory",
        "paceline zero1 shared memory",
    ]
    assert [arm.name for arm in select(arms, ["torch fsdp2 root"])] == ["torch fsdp2", "torch fsdp2 root only"]
    assert select(arms, None) == arms
    names = [arm.name for arm in arms]
    check_words(names, ["zero", "fsdp2"])
    with pytest.raises(UsageError, match="--arms zero9: no arm is called so"):
        check_words(names, ["fsdp", "zero9"])


def test_sets_of_arms_do_not_mix() -> None:
    replicated, sharded = sets_of(arms_in_bf16())
    assert not any("fsdp" in arm.name for arm in replicated)
    assert all("fsdp" in arm.name for arm in sharded)


def train_hybrid(comm: Communicator) -> dict[str, list[float]]:
    arms = select(arms_on_ranks(NANO, comm.size), ["paceline hybrid"])
    return {each.timing.arm: each.losses for each in _measure(comm, arms, NANO, SHORT)}


@pytest.mark.exhaustive
def test_hybrid_sharding_trains_as_fsdp2_does_on_a_mesh(gloo_pool: GlooPool) -> None:
    for losses in gloo_pool.run(train_hybrid, ranks=4, group_timeout_s=60.0, timeout_s=150.0):
        assert set(losses) == {"paceline hybrid", "torch fsdp2 hybrid"}
        assert losses["paceline hybrid"] == pytest.approx(losses["torch fsdp2 hybrid"], rel=1e-5)
        assert losses["paceline hybrid"][-1] < losses["paceline hybrid"][0]


@pytest.mark.exhaustive
def test_all_arms_in_bf16_train_the_same_model() -> None:
    rows = bench_bf16(NANO, SHORT, CPU, compiled=False)
    assert [row["arm"] for row in rows] == [arm.name for arm in arms_in_bf16()]
    with_masters = [row["loss"] for row in rows if "master" in row["arm"]]
    assert with_masters == pytest.approx([with_masters[0]] * 3, rel=1e-4)
    assert all(row["loss_step"] == 3 and row["num_steps"] == 2 and row["peak_bytes"] is None for row in rows)


def _without(what: str, model: nn.Module, comm: Communicator) -> Wrapped:
    """A plain loop with a mistake."""
    wrapped = arms_module._wrap_plain(model, comm)
    if what == "clipping":
        return dataclasses.replace(wrapped, update=lambda optimizer: optimizer.step())
    return dataclasses.replace(wrapped, parameters=wrapped.parameters[:-1])


@pytest.mark.some(1)
@pytest.mark.parametrize("what", ["clipping", "a layer"])
def test_an_arm_that_computes_something_else_is_named(what: str) -> None:
    plain = arms_alone()[0]
    wrong: Callable[..., Wrapped] = partial(_without, what)
    arms = [plain, Arm(name="wrong", peer=plain.name, wrap=wrong)]
    workload = NANO if what == "clipping" else MLP
    protocol = dataclasses.replace(SHORT, warm_up=8)
    measured = _measure(SoloCommunicator(CPU), arms, workload, protocol)
    with pytest.raises(TrainingError, match=r"in step \d wrong has the loss .* and plain loop has"):
        check_losses(workload, measured, 1e-6)


def test_a_loss_that_is_no_number_is_no_agreement() -> None:
    plain = _measure(SoloCommunicator(CPU), arms_alone()[:1], MLP, SHORT)[0]
    broken = MeasuredArm(timing=plain.timing, losses=[float("nan")] * 3)
    with pytest.raises(TrainingError, match="has the loss nan"):
        check_losses(MLP, [plain, broken], 1e-2)
