"""Data parallelism through shared memory: the buckets lie where all ranks can reach them, and free it in the end."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from gloo_pool import GlooPool
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.comm.shared.segment import FOLDER
from paceline.engines.apply import parallelize

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the system has no /dev/shm")


def segments() -> set[str]:
    """Returns the addresses at which this process maps shared memory of ours."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "/dev/shm/paceline-" in line}


def train(comm: Communicator, compiled: bool) -> tuple[bool, int, int, list[torch.Tensor]]:
    """Trains three steps; says whether code is compiled, how many segments more there are then, and afterwards."""
    shared = SharedMemoryCommunicator.join(comm, compiled=compiled)
    before = segments()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    engine = parallelize(model, shared, "ddp")
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        engine(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    during = len(segments() - before)
    found = [parameter.detach().clone() for parameter in model.parameters()]
    del engine, optimizer, model
    gc.collect()
    return shared.is_compiled, during, len(segments() - before), found


def test_buckets_lie_in_common_memory_for_as_long_as_they_are_used(gloo_pool: GlooPool) -> None:
    for is_compiled, during, after, _ in gloo_pool.run(train, True):
        assert (is_compiled, during, after) == (True, 1, 0)


def test_in_python_they_lie_in_plain_memory_and_the_values_are_the_same(gloo_pool: GlooPool) -> None:
    plain, compiled = gloo_pool.run(train, False), gloo_pool.run(train, True)
    assert [during for _, during, _, _ in plain] == [0, 0]
    for (*_, one), (*_, other) in zip(plain, compiled, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
