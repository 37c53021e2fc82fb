"""Hugging Face's text models in fp8 on a GPU: losses close to those of bf16, and two ranks learn as one process.

Three steps of AdamW on models with widths of 64, which tensor cores take. Numbers of 8 bits have 3 or 4 significant
ones: a loss is off by a hundredth or two of itself. Ranks round alike, since scales are powers of two
(docs/precision.md): they differ by what bf16 differs by.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Numbers
from small_models import ALL, adamw, batch_of, build, loss_of

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize

pytestmark = [
    pytest.mark.judge,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs tensor cores with fp8"
    ),
]
TEXT = ("llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "olmo2", "opt", "gpt_neox", "granite", "stablelm", "bert")
STEPS = 3
FROM_BF16, FROM_ONE_PROCESS = 0.03, 0.01  # by which a loss may be off, as shares of it


def losses(comm: Communicator, name: str, strategy: str, numbers: Numbers) -> list[float]:
    """The losses of three steps, of this rank's part of the batch; one rank has all of it."""
    engine = parallelize(build(name, numbers, times=4).train(), comm, strategy, **numbers.options)
    optimizer, found = adamw(engine.parameters()), []
    for _ in range(STEPS):
        batch = numbers.put(batch_of(name, ALL if comm.size == 1 else (comm.rank,)))
        loss = loss_of(engine, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def alone(name: str, numbers: Numbers) -> list[float]:
    work = functools.partial(losses, name=name, strategy="ddp", numbers=numbers)
    return run_virtual(work, 1, device=numbers.device, timeout_s=150.0)[0]  # it may have to load a library


@pytest.mark.parametrize("precision", ["fp8", "fp8_row"])
@pytest.mark.parametrize("two_ranks", ["virtual", "nccl"], indirect=True)
@pytest.mark.parametrize(("name", "strategy"), [(name, ("ddp", "fsdp", "zero2")[i % 3]) for i, name in enumerate(TEXT)])
def test_two_ranks_in_fp8_learn_as_one_process_and_nearly_as_in_bf16(
    name: str, strategy: str, precision: str, device: str, two_ranks: Callable[..., list[Any]]
) -> None:
    numbers = Numbers(device=device, precision=precision)
    one = alone(name, numbers)
    found = two_ranks(losses, name, strategy, numbers)
    mean = [sum(step) / len(found) for step in zip(*found, strict=True)]
    assert mean == pytest.approx(one, rel=FROM_ONE_PROCESS)
    assert one == pytest.approx(alone(name, Numbers(device=device, precision="bf16_master")), rel=FROM_BF16)
    assert mean[-1] < mean[0]
