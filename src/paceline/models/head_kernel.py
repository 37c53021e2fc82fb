"""The Triton kernel of ``head_loss``: loss, right answer and gradient of a row of logits, in one go.

A program has a row. It reads it once for the maximum and the sum of exponentials, and once more, out of the cache, for
the gradient, which it writes over the logits. All sums are in float32. Import this where there is a GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 8192
_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    targets,
    losses,
    hits,
    vocabulary,
    ignored,
    smoothing,
    smooths: tl.constexpr,
    counts: tl.constexpr,
    trains: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    is_counted = target != ignored
    # Before the first sum over all threads, behind which they may write: the target's logit is overwritten below.
    is_known = (target >= 0) & (target < vocabulary)
    own = tl.load(logits + target, mask=is_known, other=float("nan")).to(tl.float32)
    peak = -float("inf")
    total = 0.0
    added = 0.0
    best = 0
    for begin in range(0, vocabulary, block):
        place = begin + tl.arange(0, block)
        inside = place < vocabulary
        x = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
        block_peak = tl.max(x)
        if counts:  # the first of equals, as torch's argmax
            first = tl.min(tl.where(x == block_peak, place, vocabulary))
            best = tl.where(block_peak > peak, first, best)
        if smooths:
            added += tl.sum(tl.where(inside, x, 0.0))
        new_peak = tl.maximum(peak, block_peak)
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(x - new_peak))
        peak = new_peak
    loss = peak + tl.log(total) - (1.0 - smoothing) * own
    if smooths:
        loss -= smoothing * added / vocabulary
    tl.store(losses + row, tl.where(is_counted, loss, 0.0))
    if counts:
        tl.store(hits + row, (is_counted & (best == target)).to(tl.int64))
    if trains:
        for begin in range(0, vocabulary, block):
            place = begin + tl.arange(0, block)
            inside = place < vocabulary
            x = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(x - peak) / total - tl.where(place == target, 1.0 - smoothing, 0.0)
            if smooths:
                gradient -= smoothing / vocabulary
            gradient = tl.where(is_counted, gradient, 0.0)
            tl.store(logits + place, gradient.to(logits.dtype.element_ty), mask=inside)


def go_over_on_gpu(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    hits: torch.Tensor | None,
    ignored: int,
    smoothing: float,
    is_trained: bool,
) -> None:
    """Writes the losses and right answers of some rows, and the gradients of their logits over these."""
    if logits.shape[0] == 0:
        return
    launch: Any = _row_kernel[(logits.shape[0],)]
    kinds = {"smooths": smoothing > 0, "counts": hits is not None, "trains": is_trained}
    tensors = (logits, logits.stride(0), targets, losses, losses if hits is None else hits)
    with torch.cuda.device(logits.device):
        launch(*tensors, logits.shape[1], ignored, smoothing, **kinds, block=_BLOCK, num_warps=_WARPS)
