"""Max pooling of 3 x 3 pixels: numbers and gradients are torch's, for ties, nan and odd sizes; layers that it fits."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.engines.blocks import max_pool, swap_pools

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
SHAPES = ((2, 4, 8, 8), (1, 8, 7, 9), (2, 16, 9, 6), (1, 4, 1, 1), (1, 4, 2, 5), (3, 64, 14, 14), (2, 40, 33, 65))
LAST = torch.channels_last


def images(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Whole numbers, of which many are equal, and some that are none."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=random).mul(2).round()
    x[0, 0, 0, 0] = float("nan")
    x[0, 1] = -float("inf")
    return x.to(device, dtype).contiguous(memory_format=LAST)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_and_gradients_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    # Torch's on a CPU: on CUDA, channels last, a window of -inf gives its gradient to the first pixel of the image.
    x, mine = images(shape, dtype, "cpu").requires_grad_(), images(shape, dtype, device).requires_grad_()
    expected, pooled = F.max_pool2d(x, 3, 2, 1), max_pool(mine)
    assert torch.equal(pooled.nan_to_num(7.5).cpu(), expected.nan_to_num(7.5))
    assert pooled.is_contiguous(memory_format=LAST)
    # Whole numbers again: sums of up to four are exact in every dtype, whichever way they are added.
    gradient = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(4)).mul(4).round().to(dtype)
    expected.backward(gradient)
    pooled.backward(gradient.to(device))
    assert x.grad is not None
    assert mine.grad is not None
    assert torch.equal(mine.grad.cpu(), x.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck of torch 2.15 reads it
def test_the_operators_keep_torchs_rules() -> None:
    x = images((2, 4, 6, 6), torch.float32, "cpu").nan_to_num(0.0)
    found = torch.library.opcheck(torch.ops.paceline.max_pool.default, (x.requires_grad_(),))
    assert set(found.values()) == {"SUCCESS"}
    pooled, taps = torch.ops.paceline.max_pool(x.detach())
    found = torch.library.opcheck(torch.ops.paceline.max_pool_gradient.default, (pooled, taps, 6, 6))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.MaxPool2d(3, stride=2, padding=1), True),
        (nn.MaxPool2d((3, 3), stride=(2, 2), padding=(1, 1)), True),
        (nn.MaxPool2d(2), False),
        (nn.MaxPool2d(3, stride=2), False),
        (nn.MaxPool2d((3, 2), stride=2, padding=1), False),
        (nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), False),
        (nn.MaxPool2d(3, stride=2, padding=1, return_indices=True), False),
        (nn.MaxPool2d(3, stride=2, padding=1, dilation=2), False),
        (nn.AvgPool2d(3, stride=2, padding=1), False),
    ],
)
def test_layers_are_swapped_only_where_they_fit(layer: nn.Module, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())  # triton, as on a GPU
    mine, other = copy.deepcopy(layer), copy.deepcopy(layer)
    assert swap_pools(nn.Sequential(mine), torch.device("cuda")) == fits
    assert ("forward" in vars(mine)) == fits
    assert swap_pools(nn.Sequential(other), torch.device("cpu")) == 0
    assert "forward" not in vars(other)
    x = torch.randn(2, 3, 9, 9)  # not on a GPU: as before
    assert torch.equal(*(each(x)[0] if getattr(layer, "return_indices", False) else each(x) for each in (mine, layer)))


def model_of_images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.LazyLinear(5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_swapped_model_computes_as_before_on_a_gpu(dtype: torch.dtype, compiles: bool) -> None:
    x = torch.randn(4, 3, 17, 20, device="cuda", dtype=dtype).contiguous(memory_format=LAST)
    plain = model_of_images().to("cuda", dtype)
    plain(x)
    plain.to(memory_format=LAST)
    swapped = copy.deepcopy(plain)
    assert swap_pools(swapped, torch.device("cuda")) == 1
    run = torch.compile(swapped) if compiles else swapped
    assert torch.allclose(run(x), plain(x), atol=1e-4)
    for each in (run, plain):
        each(x).square().sum().backward()
    for mine, other in zip(swapped.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-3, atol=1e-3)  # type: ignore[arg-type]
