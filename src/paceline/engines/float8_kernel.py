"""A cast to 8 bits and its transposed copy in one pass, in Triton. Imported where there are a CUDA device and Triton.

Of a matrix in bf16 it reads 2 bytes a number and writes 2, both ways 16 bytes at a time: a tile is turned in shared
memory. Masks are written out for each side, since a mask that is transposed itself makes Triton store single bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _NUM_WARPS = 128, 64, 4  # of a tile, and who works on it


@triton.jit
def _cast_tile(
    x, scale, by_rows, by_columns, M, N, HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    number = tl.load(x + m[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    small = (number * tl.load(scale)).to(by_columns.dtype.element_ty)  # saturates
    if HAS_ROWS:
        tl.store(by_rows + m[:, None].to(tl.int64) * N + n[None, :], small, mask=inside)
    turned = (n[:, None] < N) & (m[None, :] < M)
    tl.store(by_columns + n[:, None].to(tl.int64) * M + m[None, :], tl.trans(small), mask=turned)


def cast_both(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, with_rows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x (M, N) times a scale in a dtype of 8 bits, empty unless ``with_rows``, and its transpose (N, M)."""
    rows, columns = x.shape
    by_rows = torch.empty((rows, columns) if with_rows else (0,), dtype=dtype, device=x.device)
    by_columns = torch.empty(columns, rows, dtype=dtype, device=x.device)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    _cast_tile[grid](
        x, scale, by_rows, by_columns, rows, columns,
        HAS_ROWS=with_rows, BLOCK_M=_ROWS, BLOCK_N=_COLUMNS, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return by_rows, by_columns
