"""Max pooling of 3 x 3 pixels at every second one, as ResNets begin, with a backward pass that reads a gradient once.

A pixel lies in up to four windows, and torch's compiler looks at all of them for each: on an H200 that takes as long
as the largest convolution of a ResNet-50. Here a program takes the four pixels that share their windows:

    pixel            even, even    even, odd           odd, even           odd, odd
    its windows      own           own, right          own, below          own, right, below, both

The largest pixel of a window is kept as its number, 0 to 8, row by row, in a byte; of equals the first, and nan before
all others, as torch does. ``swap_pools`` has a model's layers do so where their images are on a GPU, channels last, in
single or half precision; all others stay as they were.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_SIZE, _STRIDE, _PADDING = 3, 2, 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAST = torch.channels_last


def swap_pools(model: nn.Module, device: torch.device) -> int:
    """Changes how a model's max pooling runs on a GPU, in place; returns the number of layers that it fits."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return 0
    found = [each for each in model.modules() if _fits(each)]
    for each in found:
        each.forward = _forward
    return len(found)


def max_pool(x: torch.Tensor) -> torch.Tensor:
    """Pools images (samples, channels, height, width) that lie channels last."""
    pooled: torch.Tensor = _pool(x)[0]
    return pooled


def _fits(module: nn.Module) -> bool:
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    asked = (module.kernel_size, module.stride, module.padding, module.dilation)
    return all(each in (number, (number, number)) for each, number in zip(asked, (3, 2, 1, 1), strict=True))


def _forward(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda and x.dim() == 4 and x.dtype in _DTYPES and x.is_contiguous(memory_format=_LAST):
        return max_pool(x)
    return F.max_pool2d(x, _SIZE, _STRIDE, _PADDING)


def _empty_pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    samples, channels, height, width = x.shape
    shape = (samples, channels, (height - 1) // 2 + 1, (width - 1) // 2 + 1)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST)
    return y, torch.empty(shape, dtype=torch.int8, device=x.device, memory_format=_LAST)


def _run_pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous(memory_format=_LAST)
    y, taps = _empty_pooled(x)
    if x.is_cuda:
        from paceline.engines.pooling_kernel import pool_on_gpu  # where there is no GPU, there is no triton

        pool_on_gpu(x, y, taps)
        return y, taps
    values, where = F.max_pool2d(x, _SIZE, _STRIDE, _PADDING, return_indices=True)
    row, column = (torch.arange(size, device=x.device) * 2 - 1 for size in y.shape[2:])
    taps.copy_((where // x.shape[3] - row[:, None]) * 3 + where % x.shape[3] - column)
    return y.copy_(values), taps


def _empty_gradient(g: torch.Tensor, _: torch.Tensor, height: int, width: int) -> torch.Tensor:
    shape = (*g.shape[:2], height, width)
    return torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=_LAST)


def _run_gradient(g: torch.Tensor, taps: torch.Tensor, height: int, width: int) -> torch.Tensor:
    dx, g = _empty_gradient(g, taps, height, width), g.contiguous(memory_format=_LAST)
    if g.is_cuda:
        from paceline.engines.pooling_kernel import gradient_on_gpu

        gradient_on_gpu(g, taps, dx)
        return dx
    wide = torch.zeros((*g.shape[:2], height + 3, width + 3), dtype=torch.float32, device=g.device)
    for tap in range(_SIZE * _SIZE):
        part = wide[:, :, tap // 3 :: 2, tap % 3 :: 2][:, :, : g.shape[2], : g.shape[3]]
        part += torch.where(taps == tap, g.float(), 0.0)
    return dx.copy_(wide[:, :, 1 : height + 1, 1 : width + 1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, g: torch.Tensor, _: Any) -> torch.Tensor:
    gradient: torch.Tensor = _gradient(g, *ctx.saved_tensors, *ctx.size)
    return gradient


_pool = torch.library.custom_op(
    "paceline::max_pool", _run_pool, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
)
_pool.register_fake(_empty_pooled)
_gradient = torch.library.custom_op(
    "paceline::max_pool_gradient",
    _run_gradient,
    mutates_args=(),
    schema="(Tensor g, Tensor taps, SymInt height, SymInt width) -> Tensor",
)
_gradient.register_fake(_empty_gradient)
_pool.register_autograd(_backward, setup_context=_keep)
