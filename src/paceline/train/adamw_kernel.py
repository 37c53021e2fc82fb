"""AdamW for all tensors at once, in Triton. Imported where there are a CUDA device and Triton.

A table of addresses names the tensors, a column for each: one launch updates hundreds of them, and the next step may
bring gradients at other addresses. Each program of the grid updates one block of one tensor.

    row    0        1          2             3       4           5
           master   exp_avg    exp_avg_sq    step    gradient    the master's copy in bf16
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

NUM_ROWS = 6
BLOCK = 2048  # elements of a program: twice as many would leave a multiprocessor too few registers for a second one
NUM_WARPS = 8
COUNTED = 256  # steps that a program counts


@triton.jit
def _update_block(
    master, average, square, gradient, copy, where, mask, factor, rate, decay, rest1, rest2, eps, bias1, root2,
    HAS_COPY: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient + where, mask=mask).to(tl.float32) * factor
    p = tl.load(master + where, mask=mask)
    m = tl.load(average + where, mask=mask)
    v = tl.load(square + where, mask=mask)
    m += rest1 * (g - m)
    v += rest2 * (g * g - v)
    p -= rate * decay * p
    p -= rate / bias1 * m / (tl.sqrt(v) / root2 + eps)
    tl.store(master + where, p, mask=mask)
    tl.store(average + where, m, mask=mask)
    tl.store(square + where, v, mask=mask)
    if HAS_COPY:
        tl.store(copy + where, p.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["columns"])
def update_tensors(
    table, columns, owners, firsts, sizes, rates, norm, weight, max_norm, decay, rest1, rest2, log1, log2, eps,
    IS_HALF: tl.constexpr, HAS_COPY: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates one block. The caller has checked the alignment that is promised: 16 bytes of fp32 tensors, 8 of bf16."""
    program = tl.program_id(0)
    column = tl.load(owners + program)
    start = (program - tl.load(firsts + column)).to(tl.int64) * BLOCK
    size = tl.load(sizes + column)
    single = tl.pointer_type(tl.float32)
    half = tl.pointer_type(tl.bfloat16)
    master = tl.multiple_of(tl.load(table + column).to(single), 16)
    average = tl.multiple_of(tl.load(table + columns + column).to(single), 16)
    square = tl.multiple_of(tl.load(table + 2 * columns + column).to(single), 16)
    step = tl.load(tl.load(table + 3 * columns + column).to(single)) + 1.0
    if IS_HALF:
        gradient = tl.multiple_of(tl.load(table + 4 * columns + column).to(half), 8)
    else:
        gradient = tl.multiple_of(tl.load(table + 4 * columns + column).to(single), 16)
    copy = tl.multiple_of(tl.load(table + 5 * columns + column).to(half), 8)
    factor = 1.0
    is_finite = True
    if HAS_WEIGHT:
        factor = tl.load(weight)
    if HAS_NORM:
        measured = tl.load(norm)
        is_finite = tl.abs(measured) < float("inf")  # false for nan too
        factor *= tl.minimum(max_norm / (measured + 1e-6), 1.0)
    rate = tl.load(rates)
    bias1 = -libdevice.expm1(step * log1)  # 1 - beta ** step, exact where that is close to 0 too
    root2 = tl.sqrt(-libdevice.expm1(step * log2))
    where = start + tl.arange(0, BLOCK)
    if is_finite:
        if start + BLOCK <= size:  # without a mask, so that numbers are read and written four at a time
            _update_block(
                master, average, square, gradient, copy, where, None,
                factor, rate, decay, rest1, rest2, eps, bias1, root2, HAS_COPY,
            )  # fmt: skip
        else:
            _update_block(
                master, average, square, gradient, copy, where, where < size,
                factor, rate, decay, rest1, rest2, eps, bias1, root2, HAS_COPY,
            )  # fmt: skip


@triton.jit(do_not_specialize=["columns"])
def count_step(table, columns, norm, HAS_NORM: tl.constexpr, COUNTED: tl.constexpr):
    """Counts a step in the state of every column, unless the step was left out."""
    column = tl.program_id(0) * COUNTED + tl.arange(0, COUNTED)
    mask = column < columns
    added = 1.0
    if HAS_NORM:
        added = tl.where(tl.abs(tl.load(norm)) < float("inf"), 1.0, 0.0)
    steps = tl.load(table + 3 * columns + column, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    tl.store(steps, tl.load(steps, mask=mask, other=0.0) + added, mask=mask)
