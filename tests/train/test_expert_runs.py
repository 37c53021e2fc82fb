"""Runs of a config with experts: the same on one rank and on two, proved by the certificate, and resumed to the bit."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, load_config
from paceline.engines.engine import Engine
from paceline.train.assemble import build_trainer
from paceline.verify.case import ConfigCase, Settings
from paceline.verify.certificate import certify

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_moe.yaml"
TINY = (
    *("model.layers=2", "model.heads=2", "model.width=16", "model.expert_width=24", "model.context=16"),
    *("train.steps=5", "train.global_batch=8", "train.dtype=float64", "optim.schedule.warmup=2"),
)
ALONE = ("parallel.ranks=1", "parallel.expert=1")
ROUTERS = {
    "shipped": (),
    "bias": ("model.router={balance: bias, balance_weight: 0.01, scores: sigmoid, z_weight: 0.01}",),
    "capacity": ("model.router={capacity: 1.0, groups: 4, active_groups: 2}", "model.shared_experts=1"),
}


def tiny(router: str, *more: str) -> Config:
    return load_config(CONFIG, [*TINY, *ROUTERS[router], *more])


def train(comm: Communicator, config: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = build_trainer(config, comm)
    losses = []
    for result in trainer.steps():
        sums = torch.stack([result.outcome.loss_sum.double(), torch.as_tensor(result.outcome.count).double()])
        comm.all_reduce(sums).wait()
        losses.append(float(sums[0] / sums[1]))
    return losses, trainer.parts.engine.full_state_dict()


@pytest.mark.parametrize("router", ROUTERS)
def test_a_run_is_the_same_on_one_rank_and_on_two(router: str) -> None:
    ((losses, state),) = run_virtual(lambda comm: train(comm, tiny(router, *ALONE)), ranks=1)
    assert losses[-1] < losses[0]
    for expert in (1, 2):
        two = tiny(router, "train.accumulate=2", f"parallel.expert={expert}")
        for again, other in run_virtual(lambda comm, two=two: train(comm, two), ranks=2):
            assert again == pytest.approx(losses, abs=1e-9)
            torch.testing.assert_close(other, state, rtol=1e-7, atol=1e-9)


def test_the_shipped_config_has_half_of_the_experts_on_each_of_its_two_ranks() -> None:
    config = tiny("shipped")
    assert (config.parallel.ranks, config.parallel.expert) == (2, 2)

    def held(comm: Communicator) -> set[int]:
        named = build_trainer(config, comm).parts.engine.module.named_parameters()
        return {len(parameter) for name, parameter in named if ".experts." in name}

    assert run_virtual(held, ranks=2) == [{4}, {4}]


@pytest.mark.some(1)
@pytest.mark.parametrize("router", ROUTERS)
def test_the_certificate_covers_penalties_and_biases(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ConfigCase(tiny(router), batch=9)
    settings = Settings.of(ranks=2, steps=2, accumulate=2, strategy="fsdp")
    assert certify(case, settings).passed
    if router == "bias":
        monkeypatch.setattr(Engine, "move_biases", lambda *_: None)
    else:
        monkeypatch.setattr(Engine, "loss_factor", lambda *_: contextlib.nullcontext())
    assert not certify(case, settings).passed


def test_half_precision_with_a_scaled_loss_weighs_penalties_alike() -> None:
    """The penalties' part of the gradient is that of float32, though the loss is scaled by thousands."""
    router = "model.router={balance_weight: 0.5}"
    found = []
    for precision in ("fp32", "fp16"):
        config = tiny("shipped", router, "train.dtype=float32", f"train.precision={precision}", *ALONE)

        def gradients(comm: Communicator, config: Config = config) -> dict[str, torch.Tensor | None]:
            trainer = build_trainer(config, comm)
            found: dict[str, torch.Tensor | None] = {}
            trainer.parts.optimizer.register_step_pre_hook(
                lambda *_: found.update(trainer.parts.engine.full_gradients())
            )
            for _ in itertools.islice(trainer.steps(), 1):
                pass
            return found

        found += run_virtual(gradients, ranks=1)
    single, half = found
    for name, value in single.items():
        if value is not None and "router" in name:
            torch.testing.assert_close(half[name], value, rtol=0, atol=0.05 * float(value.abs().max()))
