"""Synchronised batch norm on one CUDA device, against one process that sees the whole batch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.batchnorm import standing_in, synchronise_batchnorm
from paceline.models.resnet import ResNet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = "cuda"
SHARES: list[tuple[int | None, ...]] = [(4, 3, 1), (3, None, 4), (None, 2, 5)]


def make(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(6)
    model = ResNet(18, num_classes=3, in_channels=2, width=4, norm="batch", stem="small")
    return model.to(DEVICE, dtype, memory_format=torch.channels_last)


def train(model: nn.Module, comm: Communicator | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Trains on all samples, or on a rank's share of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, counts in enumerate(SHARES):
        total = sum(count or 0 for count in counts)
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(total, 2, 8, 8, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        x, y = x.to(memory_format=torch.channels_last), torch.randint(0, 3, (total,), generator=generator).to(DEVICE)
        mine: int | None = total
        if comm is not None:
            mine, end = counts[comm.rank], list(itertools.accumulate(count or 0 for count in counts))[comm.rank]
            x, y = x[end - (mine or 0) : end], y[end - (mine or 0) : end]
        optimizer.zero_grad()
        if mine is None:
            with standing_in(model):
                _reduce(model, comm)
        else:
            (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
            _reduce(model, comm)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _reduce(model: nn.Module, comm: Communicator | None) -> None:
    for parameter in model.parameters() if comm is not None else []:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        comm.all_reduce(parameter.grad).wait()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_training_is_that_of_one_process(dtype: torch.dtype, tolerance: float) -> None:
    expected = train(make(dtype), None, dtype)
    found = run_virtual(
        lambda comm: train(synchronise_batchnorm(make(dtype), comm), comm, dtype), len(SHARES[0]), device=DEVICE
    )
    for state in found:
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_keep_wide_statistics(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(1)) + 4).to(DEVICE, dtype)
    alone = nn.BatchNorm2d(3, device=DEVICE)
    y = x.clone().requires_grad_()
    expected = alone(y)
    (expected.float() ** 3).sum().backward()

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = synchronise_batchnorm(nn.Sequential(nn.BatchNorm2d(3, device=DEVICE)), comm)
        part = (x[:4] if comm.rank == 0 else x[4:]).clone().requires_grad_()
        found = layer(part)
        (found.float() ** 3).sum().backward()
        return found.detach(), part.grad, layer[0].running_var

    (out0, grad0, variance), (out1, grad1, _) = run_virtual(work, 2, device=DEVICE)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat([out0, out1]), expected.detach(), rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(torch.cat([grad0, grad1]), y.grad, rtol=16 * eps, atol=64 * eps)
    torch.testing.assert_close(variance, alone.running_var, rtol=1e-5, atol=1e-6)
