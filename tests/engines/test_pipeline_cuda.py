"""Pipelines and tensor parallelism on a GPU: virtual ranks that share it train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.models.gpt import GPT, gpt_config
from paceline.train.loss import LossValue

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCABULARY, CONTEXT, MICROBATCHES, STEPS = 32, 8, 4, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"layers": 4, "heads": 4, "kv_heads": 2, "width": 32, "context": CONTEXT, "vocab_size": VOCABULARY}
    return GPT(gpt_config(None, **sizes)).double()


def microbatches(step: int, data_rank: int, data_ranks: int) -> list[Any]:
    """The share of one data rank, cut into microbatches."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8 * MICROBATCHES, CONTEXT + 1), generator=generator).cuda()
    mine = tokens.chunk(data_ranks)[data_rank]
    return [(part[:, :-1], part[:, 1:]) for part in mine.chunk(MICROBATCHES)]


def summed_loss(model: Any, microbatch: Any) -> LossValue:
    inputs, targets = microbatch
    logits = model(inputs)
    total = (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        if isinstance(logits, torch.Tensor)
        else logits.cross_entropy(targets)
    )
    return LossValue(total=total, count=float(targets.numel()))


def single() -> dict[str, torch.Tensor]:
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        parts = [summed_loss(model, each) for each in microbatches(step, 0, 1)]
        (sum(part.total for part in parts) / sum(part.count for part in parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def spread(comm: Communicator, strategy: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = parallelize(make_model(), comm, strategy, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    for step in range(STEPS):
        mine = microbatches(step, engine.comm.rank, engine.comm.size)
        scale = engine.loss_scale(sum(float(targets.numel()) for _, targets in mine))
        if options.get("pipeline", 1) > 1:
            engine.run_microbatches(mine, summed_loss, scale)
        else:
            (sum(summed_loss(engine, each).total for each in mine) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.full_state_dict()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_every_schedule_trains_as_one_process(schedule: str) -> None:
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    check(2, "ddp", {"pipeline": 2, "schedule": schedule, "chunks": chunks or 0})


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_three_dimensions_on_one_gpu_train_as_one_process(strategy: str) -> None:
    check(8, strategy, {"pipeline": 2, "tensor": 2})


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallelism_trains_as_one_process(sequence: bool) -> None:
    check(2, "ddp", {"tensor": 2, "sequence_parallel": sequence})


def check(ranks: int, strategy: str, options: dict[str, Any]) -> None:
    expected = single()
    for found in run_virtual(lambda comm: spread(comm, strategy, options), ranks, device="cuda"):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name].cpu(), value, rtol=0, atol=1e-9, msg=name)
