"""Feeding a GPU: copies on a stream of their own, ordered with what computes; no memory is reused too early."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from paceline.data.datasets import TensorPairs, gather
from paceline.data.fetch import LoaderOptions, _Copies
from paceline.data.loader import TrainLoader
from paceline.data.order import DataOrder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIDE = 512


def device() -> torch.device:
    return torch.device("cuda", 0)


class Listed:
    """A user's data set: sample i is a row full of i."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((SIDE,), float(index)), index


def rows(length: int) -> TensorPairs:
    return TensorPairs(
        torch.arange(length).float()[:, None].expand(length, SIDE * SIDE).contiguous(), torch.arange(length)
    )


def test_gathered_rows_are_pinned() -> None:
    found = gather(torch.arange(12).view(4, 3), torch.tensor([2, 0]), pinned=True)
    assert found.is_pinned()
    assert found.tolist() == [[6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize("kind", ["memory", "users", "workers"])
def test_batches_are_right_while_the_device_lags_behind(kind: str) -> None:
    """A race with the allocator or the copies would show another batch's numbers in the sums."""
    dataset: Any = Listed() if kind == "users" else rows(64)
    workers = int(kind == "workers")
    order = DataOrder(length=64, global_batch=4, seed=1)
    options = LoaderOptions(device=device(), workers=workers, worker_start="fork")
    heavy = torch.randn(4096, 4096, device=device())
    sums, expected = [], []
    with contextlib.closing(TrainLoader(dataset, order, options=options).steps(0, 48)) as steps:
        for step in steps:
            (inputs, targets) = step.microbatches[0]
            assert inputs.is_cuda
            assert targets.is_cuda
            for _ in range(4):
                heavy = (heavy @ heavy).clamp_(-1, 1)  # the device is far behind the host
            sums.append(torch.stack([inputs.mean(1).sum(), targets.sum().float()]))
            assert step.indices is not None
            expected.append(float(step.indices.sum()))
            del inputs, targets, step  # so that the allocator may take the memory back
    found = torch.stack(sums).tolist()
    assert found == [[each, each] for each in expected]


def test_strides_are_kept() -> None:
    images = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).view(2, 4, 4, 3).permute(0, 3, 1, 2)
    copies = _Copies(device(), limit=4)
    placed, other = copies.hand_out(copies.send((images, "a name")))
    assert placed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(placed.cpu(), images)
    assert other == "a name"


def test_the_host_stays_near_the_device() -> None:
    copies = _Copies(device(), limit=3)
    heavy = torch.randn(4096, 4096, device=device())
    for _ in range(20):
        copies.hand_out(copies.send(torch.ones(8)))
        for _ in range(4):
            heavy = (heavy @ heavy).clamp_(-1, 1)
        assert len(copies._handed_out) <= 3
    torch.cuda.synchronize()


def test_without_memory_the_batch_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = _Copies(device(), limit=3)

    def refuse(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(copies, "_copy", refuse)
    (batch,) = copies.hand_out(copies.send((torch.ones(8),)))
    assert batch.device.type == "cpu"
