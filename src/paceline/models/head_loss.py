"""Cross entropy together with the output layer, without the logits of the whole batch.

    sum, correct = sum over rows of cross_entropy(hidden @ weight^T, targets), and how often the largest logit is right

The logits of N tokens over a vocabulary of V are N V numbers. Here they are made for some rows at a time, in one buffer
that the gradient of these rows then overwrites:

    for each chunk of R rows     logits = hidden @ weight^T        a product of 2 R V W operations
                                 loss; logits become p - target    one pass over R V numbers (a Triton kernel on CUDA)
                                 d_hidden = logits @ weight        the products of backward, made on the way
                                 d_weight += logits^T @ hidden     in float32, or float64 where the model is

    memory      R V numbers, + d_hidden and d_weight, which are kept for backward; in place of 2 N V numbers or more
    time        that of the plain loss, less its passes over the logits; backward multiplies by a number and no more

``torch.nn.functional.linear_cross_entropy`` (torch 2.13) returns the sum in bf16 and adds up the gradient of the weight
in it, makes all logits with label smoothing, and counts no right answers.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.plan.layout import loss_rows

_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor targets, int ignored, float smoothing, int rows, bool for_hidden, "
    "bool for_weight, bool counts) -> (Tensor, Tensor, Tensor, Tensor)"
)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_Found = tuple[Tensor, Tensor, Tensor, Tensor]  # the sum, right answers, gradients of hidden and weight


class _Options(TypedDict, total=False):
    """Options of ``head_loss`` that do not say what it returns."""

    ignored: int
    smoothing: float
    rows: int | None


@overload
def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, counts: Literal[False] = ..., **options: Unpack[_Options]
) -> Tensor: ...
@overload
def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, counts: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignored: int = -100,
    smoothing: float = 0.0,
    rows: int | None = None,
    counts: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the summed cross entropy of ``hidden @ weight.T``; with ``counts`` the number of right answers too.

    ``hidden`` is (..., width), ``weight`` (vocabulary, width), ``targets`` (...). Targets that are ``ignored`` count
    nothing; ``smoothing`` is torch's. ``rows`` are computed at once (None: as many as make a GiB of logits). Under
    autocast products are in its dtype. Backward may run once. Raises UsageError for shapes that do not fit, and for
    targets out of range on a CPU; on a GPU, where looking would take time, such a target makes the sum NaN.
    """
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[-1]:
        what = f"hidden states of shape {list(hidden.shape)} and an output layer of shape {list(weight.shape)}"
        rule = "the output layer is a matrix (vocabulary, width), and hidden states are (..., width)"
        fix = "give the weight of the layer that makes the logits, and what goes into it"
        raise UsageError(f"{what}\n  {rule}\n  {fix}")
    if hidden.shape[:-1] != targets.shape:
        what = f"targets of shape {list(targets.shape)} for hidden states of shape {list(hidden.shape)}"
        rule = "each row has one target"
        raise UsageError(f"{what}\n  {rule}\n  give targets of the hidden states' shape without its last dim")
    flat = hidden.reshape(-1, hidden.shape[-1]).to(_compute_dtype(hidden))
    if rows is None:
        rows = loss_rows(weight.shape[0], flat.element_size())
    needs = (torch.is_grad_enabled() and each.requires_grad for each in (flat, weight))
    # A recorder of meta tensors is to see the products that a device would run, and not one operator of ours.
    run: Any = _OnMeta.apply if hidden.is_meta else _operator
    flat_targets = targets.reshape(-1).contiguous()
    smoothing = float(smoothing) if smoothing else 0.0  # a constant for torch.compile, where it is none
    found = cast("_Found", run(flat, weight, flat_targets, ignored, smoothing, rows, *needs, counts))
    return (found[0], found[1]) if counts else found[0]


class OutputLayer(nn.Linear):
    """A linear layer that makes logits, or their loss. It reads its weight in its own call, as sharding needs it."""

    def forward(self, x: Tensor, targets: Tensor | None = None, *, counts: bool = False) -> Any:
        """Returns the logits; with ``targets`` their summed cross entropy, with ``counts`` right answers too."""
        if targets is None:
            return super().forward(x)
        bias: Tensor | None = self.bias
        if bias is not None:
            rule = "the fused loss is that of hidden @ weight.T"
            fix = "make the layer with bias=False, or compute the loss of its logits"
            raise UsageError(f"the loss of an output layer with a bias\n  {rule}\n  {fix}")
        return head_loss(x, self.weight, targets, counts=counts)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype that products of ``hidden`` are computed in: autocast's, where it is on."""
    if hidden.is_meta:  # the device that is played may cast, and a small product tells
        row = hidden.detach().reshape(-1, hidden.shape[-1])[:1]
        return torch.mm(row, row.t()).dtype
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


# The operator: opaque to torch.compile, which puts it into one graph with the model whatever the number of rows.


def _walk(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> _Found:
    """Goes over the rows, chunk by chunk. Gradients that nobody asked for are empty. ``options``: see the schema."""
    ignored, smoothing, rows = options[:3]
    results = _make_results(hidden, weight, targets, *options[3:])
    if targets.device.type == "cpu":
        check_targets(targets, weight.shape[0], ignored)
    kind = hidden.device.type
    with contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        _fill(results, hidden, weight.to(hidden.dtype), targets, ignored, smoothing, rows)
    losses, hits, d_hidden, d_weight = results
    return losses.sum(), hits.sum(), d_hidden, d_weight.to(weight.dtype)


def _fill(
    results: _Found, hidden: Tensor, matrix: Tensor, targets: Tensor, ignored: int, smoothing: float, rows: int
) -> None:
    """Computes the results of all rows. What has no elements is not asked for."""
    losses, hits, d_hidden, d_weight = results
    num_rows, is_trained = hidden.shape[0], d_hidden.numel() + d_weight.numel() > 0
    if num_rows == 0:
        d_weight.zero_()
    buffer = hidden.new_empty(min(rows, num_rows), matrix.shape[0])
    for begin in range(0, num_rows, rows):
        part = slice(begin, min(begin + rows, num_rows))
        logits, inputs = buffer[: part.stop - begin], hidden[part]
        torch.mm(inputs, matrix.t(), out=logits)
        rows_hits = hits[part] if hits.numel() else None
        _go_over(logits, targets[part], losses[part], rows_hits, ignored, smoothing, is_trained)
        if d_hidden.numel() and not hidden.is_meta:
            torch.mm(logits, matrix, out=d_hidden[part])
        if d_weight.numel() and not hidden.is_meta:
            _add_product(d_weight, logits.t(), inputs, is_first=begin == 0)


def _make_results(
    hidden: Tensor, weight: Tensor, targets: Tensor, for_hidden: bool, for_weight: bool, counts: bool
) -> _Found:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses = hidden.new_empty(hidden.shape[0], dtype=wide)
    hits = targets.new_empty(targets.shape[0] if counts else 0, dtype=torch.int64)
    d_hidden = hidden.new_empty(hidden.shape if for_hidden else (0,))
    d_weight = weight.new_empty(weight.shape if for_weight else (0,), dtype=wide)
    return losses, hits, d_hidden, d_weight


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> _Found:
    """The shapes of the results, for torch.compile."""
    losses, hits, d_hidden, d_weight = _make_results(hidden, weight, targets, *options[3:])
    return losses.sum(), hits.sum(), d_hidden, d_weight.to(weight.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Found) -> None:
    _, correct, d_hidden, d_weight = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(correct, d_hidden, d_weight)
    ctx.save_for_backward(d_hidden, d_weight)
    ctx.is_needed = inputs[6:8]


def _scale(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Backward: the gradients are there, and are multiplied in place. Torch refuses a second backward for that."""
    found: list[Tensor | None] = [None, None]
    if gradient is not None:
        pairs = zip(ctx.saved_tensors, ctx.is_needed, strict=True)
        found = [each.mul_(gradient) if is_needed else None for each, is_needed in pairs]
    return *found, *[None] * 7


_operator = torch.library.custom_op("paceline::head_loss", _walk, mutates_args=(), schema=_SCHEMA)
_operator.register_fake(_fake)
_operator.register_autograd(_scale, setup_context=_keep)


class _OnMeta(torch.autograd.Function):
    """The same for tensors without values, product by product: those of the gradients run, and count, in backward."""

    forward = staticmethod(_walk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Found) -> None:
        hidden, weight, rows = inputs[0], inputs[1], inputs[5]
        ctx.sizes = (hidden.shape[0], weight.shape[1], weight.shape[0], rows, hidden.dtype)
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        num_rows, width, vocabulary, rows, dtype = ctx.sizes
        for begin in range(0, num_rows, rows):
            size = min(rows, num_rows - begin)
            shapes = ((size, vocabulary), (size, width), (vocabulary, width))
            chunk, inputs, matrix = (gradient.new_empty(shape, dtype=dtype) for shape in shapes)
            if ctx.is_needed[0]:
                torch.mm(chunk, matrix, out=inputs)
            if ctx.is_needed[1]:
                torch.mm(chunk.t(), inputs, out=matrix)
            del chunk, inputs, matrix
        return _scale(ctx, gradient)


def check_targets(targets: Tensor, vocabulary: int, ignored: int) -> None:
    """Raises UsageError for a target that is no token. Reads values: on a GPU the host would wait for them."""
    wrong = targets[((targets < 0) | (targets >= vocabulary)) & (targets != ignored)]
    if wrong.numel():
        rule = f"targets are 0 to {vocabulary - 1}, or {ignored} where nothing is to be predicted"
        fix = "give the model a larger vocabulary, or look at the data"
        raise UsageError(f"a target is {int(wrong[0])}, but the vocabulary has {vocabulary} tokens\n  {rule}\n  {fix}")


def _go_over(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    hits: Tensor | None,
    ignored: int,
    smoothing: float,
    is_trained: bool,
) -> None:
    """Writes the losses and right answers (None: nobody asks) of some rows; if trained, gradients over their logits."""
    if logits.is_cuda and logits.dtype != torch.float64 and _HAS_TRITON:
        from paceline.models.head_kernel import go_over_on_gpu  # where there is no GPU, there is no triton

        go_over_on_gpu(logits, targets, losses, hits, ignored, smoothing, is_trained)
        return
    if logits.is_meta:  # in place of the kernel above: one pass
        torch.ops.aten._softmax.out(logits, -1, False, out=logits)
        return
    is_counted = targets != ignored
    index = torch.where(is_counted, targets, 0)[:, None]
    if hits is not None:
        hits.copy_((logits.argmax(-1) == targets) & is_counted)
    wide = logits.to(losses.dtype)
    normaliser = wide.logsumexp(-1)
    row = normaliser - (1 - smoothing) * wide.gather(1, index)[:, 0]
    if smoothing:
        row -= smoothing * wide.mean(-1)
    losses.copy_(torch.where(is_counted, row, 0.0))
    if is_trained:
        wide.sub_(normaliser[:, None]).exp_()
        if smoothing:
            wide.sub_(smoothing / wide.shape[1])
        wide.scatter_add_(1, index, wide.new_full(index.shape, smoothing - 1))
        wide.mul_(is_counted[:, None])
        if wide is not logits:
            logits.copy_(wide)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Adds a product to ``total``, which may be wider than what is multiplied; the first one overwrites it."""
    beta = 0 if is_first else 1
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta)
    elif total.is_cuda and torch.version.hip is None:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif is_first:  # the product of a chunk is rounded, their sum is not
        total.copy_(torch.mm(left, right))
    else:
        total.add_(torch.mm(left, right))
