"""Mixed precision on one CUDA device: ranks against one, steps that never wait, and steps that are left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.precision import PRECISIONS, check_precision, mixed_precision
from paceline.errors import TrainingError
from paceline.train.assemble import build_trainer
from paceline.train.loss import CrossEntropy, LossValue
from paceline.train.step import Passes, StepPolicy, make_scaler, train_step
from paceline.train.survive.recovery import BadSteps, find_overflow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
NAMES = ["fp32", "bf16", "fp16", "bf16_master"]
PARTS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 5),
    )


def step_batch(step: int, ranks: int = 1, rank: int = 0, *, pin: bool = False) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(16, 3, 8, 8, generator=generator), torch.randint(5, (16,), generator=generator)
    pieces: list[Any] = list(zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True))[rank::ranks]
    if pin:
        pieces = [tuple(t.pin_memory() for t in piece) for piece in pieces]
    sizes = [len(piece[0]) for piece in pieces]
    return StepBatch(position=0, next_position=16, epoch=0, global_samples=16, microbatches=pieces, local_samples=sizes)


def train(comm: Communicator, name: str, strategy: str, steps: int = 3) -> dict[str, torch.Tensor]:
    engine = parallelize(make_model(), comm, strategy, precision=name)
    engine.eval()  # statistics of a microbatch would depend on the cut
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.05, momentum=0.5, fused=True)
    scaler = make_scaler(engine.precision, comm.device, 1024.0)
    for step in range(steps):
        batch = step_batch(step, comm.size, comm.rank)
        train_step(engine, optimizer, batch, CrossEntropy(1.0), StepPolicy(), scaler=scaler)
    return engine.full_state_dict()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_virtual_ranks_train_as_one_of_the_same_policy(strategy: str, name: str) -> None:
    expected = train(SoloCommunicator(torch.device("cuda", 0)), name, "ddp")
    for found in run_virtual(lambda comm: train(comm, name, strategy), PARTS, device="cuda"):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_the_device_computes_in_every_policy_and_batch_norm_works_in_training(name: str) -> None:
    device = torch.device("cuda", 0)
    check_precision(PRECISIONS[name], device)
    assert mixed_precision(device).name == "bf16"
    engine = parallelize(make_model(), SoloCommunicator(device), precision=name)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01, fused=True)
    scaler = make_scaler(engine.precision, device, 1024.0)
    losses = []
    for _ in range(12):
        outcome = train_step(engine, optimizer, step_batch(0), CrossEntropy(1.0), StepPolicy(), scaler=scaler)
        losses.append(float(outcome.loss_sum) / 16)
    assert losses[-1] < 0.7 * losses[0]
    assert engine.module[1].running_mean.dtype is torch.float32  # type: ignore[index]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("name", NAMES)
def test_no_step_waits_for_the_device(name: str, optimizer_class: Any) -> None:
    """Also with a scale that moves, and steps that are left out: the fused optimizer looks at a flag on the device."""
    device = torch.device("cuda", 0)
    engine = parallelize(make_model(), SoloCommunicator(device), precision=name)
    settings = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    optimizer = optimizer_class(engine.parameters(), lr=0.01, fused=True, **settings)
    scaler = make_scaler(engine.precision, device, 1024.0)
    counter = BadSteps()

    def step(loss: Any, number: int) -> None:
        batch = step_batch(number, pin=True)
        outcome = train_step(engine, optimizer, batch, loss, StepPolicy(clip_norm=1.0), scaler=scaler)
        list(counter.note(number, outcome, None))

    for number in range(2):
        step(CrossEntropy(1.0), number)
    before = engine.full_state_dict()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(Broken(1.0), 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = engine.full_state_dict()
    names = [key for key, _ in engine.named_parameters()]
    assert all(torch.equal(before[key], after[key]) for key in names)
    step(CrossEntropy(1.0), 3)
    list(counter.read())
    assert counter.state_dict() == {"num_skipped": 1, "num_in_a_row": 0}
    assert not torch.equal(engine.full_state_dict()[names[0]], before[names[0]])
    if scaler is not None:
        assert scaler.state_dict()["scale"] == 512.0


class Broken(CrossEntropy):
    def __call__(self, model: Any, batch: Any) -> LossValue:
        value = super().__call__(model, batch)
        return LossValue(value.total * math.inf, value.count)


def test_an_optimizer_that_is_not_fused_leaves_the_step_out_too() -> None:
    engine = parallelize(make_model(), SoloCommunicator(torch.device("cuda", 0)))
    optimizer = torch.optim.RMSprop(engine.parameters(), lr=0.01)
    before = engine.full_state_dict()
    outcome = train_step(engine, optimizer, step_batch(0), Broken(1.0), StepPolicy())
    assert outcome.is_updated is False
    after = engine.full_state_dict()
    assert all(torch.equal(before[key], after[key]) for key, _ in engine.named_parameters())


def test_an_overflow_in_fp16_is_found_on_the_device() -> None:
    engine = parallelize(make_model(), SoloCommunicator(torch.device("cuda", 0)), precision="fp16")
    with torch.no_grad():
        engine.module[4].weight.fill_(3e4)  # type: ignore[index]
    found = find_overflow(Passes(engine, step_batch(0).microbatches, CrossEntropy(1.0), 1.0, torch.float32))
    assert found is not None
    assert found.what.startswith("4 (Linear) in forward: ")


def test_too_many_bad_steps_stop_a_run_on_cuda() -> None:
    config = config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 8},
            "data": {"kind": "synthetic_classification", "samples": 64, "features": 6, "classes": 3},
            "train": {"steps": 20, "global_batch": 8, "max_bad_steps": 4},
        }
    )
    trainer = build_trainer(config, SoloCommunicator(torch.device("cuda", 0)))
    steps = trainer.steps()
    for _ in range(3):
        next(steps)
    with torch.no_grad():
        next(iter(trainer.parts.engine.parameters())).fill_(math.inf)
    with pytest.raises(TrainingError, match="4 steps in a row had gradients that are not finite, up to step 7"):
        for _ in steps:
            pass
