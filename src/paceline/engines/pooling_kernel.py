"""The Triton kernels of ``blocks.py``. Imported where there are a CUDA device and Triton.

A program has a part of one row of windows, of all their channels. Images lie channels last.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _own_part(rows, columns, channels: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a program's row of windows, among all and in its image, and its numbers: place, column, channel, mask."""
    line = tl.program_id(0)
    place = tl.program_id(1) * block + tl.arange(0, block)
    return line, line % rows, place, place // channels, place % channels, place < columns * channels


@triton.jit  # type: ignore[untyped-decorator]
def _pool_kernel(x, y, taps, height, width, rows, columns, channels: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    line, row, place, column, channel, inside = _own_part(rows, columns, channels, block)
    x += (line // rows).to(tl.int64) * height * width * channels
    best = tl.full([block], -float("inf"), tl.float32)
    # The first pixel of the window, should none be larger than -inf.
    tap = tl.where(column == 0, 1, 0) + tl.where(row == 0, 3, 0)
    for i in tl.static_range(3):
        h = 2 * row - 1 + i
        for j in tl.static_range(3):
            w = 2 * column - 1 + j
            is_there = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            value = tl.load(x + (h * width + w) * channels + channel, mask=is_there, other=-float("inf"))
            value = value.to(tl.float32)
            is_taken = is_there & ((value > best) | (value != value))  # nan wins, as in torch
            best = tl.where(is_taken, value, best)
            tap = tl.where(is_taken, 3 * i + j, tap)
    out = line.to(tl.int64) * columns * channels + place
    tl.store(y + out, best.to(y.dtype.element_ty), mask=inside)
    tl.store(taps + out, tap.to(tl.int8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _taken(gradient, tap, number: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(tap == number, gradient, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(g, taps, dx, height, width, rows, columns, channels: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    line, row, place, column, channel, inside = _own_part(rows, columns, channels, block)
    # The windows that the pixels (2 row, 2 column) to (2 row + 1, 2 column + 1) lie in: this one, right, below, both.
    at = line.to(tl.int64) * columns * channels + place
    has_right = inside & (column + 1 < columns)
    has_below = inside & (row + 1 < rows)
    has_both = has_right & has_below
    right, below = at + channels, at + columns * channels
    both = below + channels
    tap, tap_right = tl.load(taps + at, mask=inside, other=-1), tl.load(taps + right, mask=has_right, other=-1)
    tap_below, tap_both = tl.load(taps + below, mask=has_below, other=-1), tl.load(taps + both, mask=has_both, other=-1)
    own = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    from_right = tl.load(g + right, mask=has_right, other=0.0).to(tl.float32)
    from_below = tl.load(g + below, mask=has_below, other=0.0).to(tl.float32)
    from_both = tl.load(g + both, mask=has_both, other=0.0).to(tl.float32)
    kind = dx.dtype.element_ty
    dx += (line // rows).to(tl.int64) * height * width * channels + (2 * row * width + 2 * column) * channels + channel
    has_column, has_row = inside & (2 * column + 1 < width), inside & (2 * row + 1 < height)
    tl.store(dx, _taken(own, tap, 4).to(kind), mask=inside)
    on_right = _taken(own, tap, 5) + _taken(from_right, tap_right, 3)
    tl.store(dx + channels, on_right.to(kind), mask=has_column)
    on_left = _taken(own, tap, 7) + _taken(from_below, tap_below, 1)
    tl.store(dx + width * channels, on_left.to(kind), mask=has_row)
    on_right = _taken(own, tap, 8) + _taken(from_right, tap_right, 6)
    on_right += _taken(from_below, tap_below, 2) + _taken(from_both, tap_both, 0)
    tl.store(dx + (width + 1) * channels, on_right.to(kind), mask=has_row & has_column)


def pool_on_gpu(x: torch.Tensor, y: torch.Tensor, taps: torch.Tensor) -> None:
    """Fills what was pooled, and from which pixel of the window each number is."""
    _launch(_pool_kernel, (x, y, taps), x, y)


def gradient_on_gpu(g: torch.Tensor, taps: torch.Tensor, dx: torch.Tensor) -> None:
    _launch(_gradient_kernel, (g, taps, dx), dx, g)


def _launch(kernel: Any, tensors: tuple[torch.Tensor, ...], images: torch.Tensor, pooled: torch.Tensor) -> None:
    samples, channels, rows, columns = pooled.shape
    grid = (samples * rows, triton.cdiv(columns * channels, _BLOCK))
    kernel[grid](*tensors, *images.shape[2:], rows, columns, channels, _BLOCK, num_warps=_WARPS)
