"""The Newton-Schulz iteration: takes the singular values of a matrix near 1, with matrix products alone.

    X <- G / |G|,   then five times   X <- a X + (b A + c A^2) X   with A = X X^T

The coefficients rise as fast as possible at 0 and leave singular values between about 0.7 and 1.2, as in Keller
Jordan's post and in torch.optim.Muon. FLOPs for an m x n matrix with m <= n, and i iterations:

    on the matrix itself       i (4 m^2 n + 2 m^3)          what bf16 is computed with
    on its Gram matrix X X^T   4 m^2 n + (8 i - 6) m^3      fewer where n > 1.5 m; small eigenvalues need fp32 or more

Both give the same numbers but for rounding: the iteration multiplies X by polynomials in X X^T.
"""

from __future__ import annotations

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
_WIDE = 1.5


def orthogonalise(stack: torch.Tensor, iterations: int) -> torch.Tensor:
    """Returns a stack of matrices (b, rows, columns) with its singular values taken near 1, in the stack's dtype."""
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if is_tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    if _uses_gram(x.shape[-2], x.shape[-1], x.dtype):
        x = _polynomial(_gram(x), iterations) @ x
    else:
        for _ in range(iterations):
            gram = _gram(x)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


def orthogonal_flops(shape: tuple[int, int], iterations: int, dtype: torch.dtype) -> int:
    """Returns the floating point operations of one matrix."""
    m, n = min(shape), max(shape)
    if _uses_gram(m, n, dtype):
        return 4 * m * m * n + max(8 * iterations - 6, 0) * m**3
    return iterations * (4 * m * m * n + 2 * m**3)


def _gram(x: torch.Tensor) -> torch.Tensor:
    """Returns X X^T. A CPU multiplies by a transposed copy up to three times as fast as by a transposed view."""
    return x @ (x.mT.contiguous() if x.device.type == "cpu" else x.mT)


def _uses_gram(short: int, long: int, dtype: torch.dtype) -> bool:
    return long > _WIDE * short and dtype in (torch.float32, torch.float64)


def _polynomial(gram: torch.Tensor, iterations: int) -> torch.Tensor:
    """Returns what the iterations multiply a matrix by, from its Gram matrix. All factors commute."""
    product: torch.Tensor | None = None
    for number in range(iterations):
        factor = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        factor.diagonal(dim1=-2, dim2=-1).add_(_A)
        product = factor if product is None else product @ factor
        if number < iterations - 1:
            gram = factor @ gram @ factor
    assert product is not None
    return product
