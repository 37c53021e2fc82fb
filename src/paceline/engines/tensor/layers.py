"""Tensor parallelism: T ranks hold a part of every layer, and compute one model together.

    column   y_r = x W_r^T            a rank has some of the outputs: of the heads, or of the MLP's features
    row      y   = sum_r x_r W_r^T    a rank has the inputs that its columns gave: the sum goes over the ranks

A column layer followed by a row layer needs one sum in forward, of the row layer's output, and one in backward, of the
gradient of the column layers' input. For a stream of B bytes (batch x length x width), a transformer block sends per
rank 2 all-reduces of B in forward and 2 in backward, 4 B (T-1)/T bytes each, and has 1/T of its parameters and of the
memory of what is inside. *Sequence parallelism* splits the parts between along the sequence: an all-gather where a
split part begins and a reduce-scatter where it ends are the same bytes, and norms and the stream itself take 1/T of
their memory too. It pays while a block's products take longer than its four sums: within a host.

[Note: complete gradients] Every parameter's gradient is complete when autograd delivers it, and for one that is not
split the same on all ranks, to the bit. Where a whole parameter works on a part of the stream (norms between, under
sequence parallelism), it goes through ``TensorRegion.share``, whose backward sums.

Logits stay split by vocabulary. With z those of a token, of which each rank has a part, the loss is

    log sum_v exp(z_v - m) - (z_target - m)        m = max_v z_v

so three numbers a token travel: one all-reduce of maxima, one of the sums of exponentials together with the target's
logit. For N tokens that is 24 N bytes a rank in fp32 at most, where gathering would send 4 N V (T-1)/T. Backward sends
nothing: each rank has the probabilities of its own part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from paceline.comm.base import Communicator
from paceline.engines.float8 import float8_linear
from paceline.engines.nodes import TensorRegion, moved, same
from paceline.engines.tensor.layout import Split, drawn_whole, split_range
from paceline.errors import UsageError
from paceline.models.head_loss import check_targets
from paceline.models.lora import A, Adapted

# Layers. Each is mixed into the class of the layer that it replaces, which knows how it is initialised.


class SplitLayer(nn.Module):
    """A layer that has a part of its parameters: what the kinds below have in common."""

    region: TensorRegion  # of a vocabulary layer: as the stream is behind the embedding, and before the output layer
    splits: Mapping[str, Split]  # of its own parameters
    is_transposed: bool = False  # the weight is (inputs, outputs)
    is_whole: bool = False  # what a column layer returns, and what a row layer reads, is whole on every rank
    float8_by_row: bool | None = None  # products read operands of 8 bits, with one scale or one for each row

    def reset_parameters(self) -> None:
        """Gives the parameters this rank's part of what the plain layer would draw."""
        with drawn_whole(self, self.splits, self.region.comm):
            super().reset_parameters()  # type: ignore[misc]

    @property
    def own_range(self) -> tuple[int, int]:
        """The rows of the whole weight that this rank has, from the first to one past the last."""
        comm = self.region.comm
        return split_range(self.splits["weight"].shape[0], comm.size, comm.rank)

    @property
    def matrix(self) -> Tensor:
        """The weight as (outputs, inputs)."""
        weight = cast("Tensor", self.weight)
        return weight.t() if self.is_transposed else weight

    def late_matrix(self) -> Tensor | None:
        """Returns the weight whose gradient may be computed later than the input's; None where it may not."""
        # A product of 8 bits computes its weight gradient in its own node, which casts the gradient once.
        is_late = cast("Tensor", self.weight).requires_grad and self.float8_by_row is None
        return self.matrix if is_late else None

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.float8_by_row is not None:
            y = float8_linear(x, self.matrix, bias, by_row=self.float8_by_row)
        else:
            late = None if torch.compiler.is_compiling() else self.region.late.pop(self, None)
            y = F.linear(x, self.matrix, bias) if late is None else late(x, bias)
        if not isinstance(self, Adapted):
            return y
        # One matrix of the adapter is split as the weight is; the other is whole, and its gradients are of parts.
        is_first_split = A in self.splits
        (shared,) = self.region.share(self.lora_b if is_first_split else self.lora_a)
        return y + (self.added(x, self.lora_a, shared) if is_first_split else self.added(x, shared, self.lora_b))


class ColumnLinear(SplitLayer):
    """A linear layer with some of the outputs. What it reads has entered the split part."""

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x, cast("Tensor | None", self.bias))
        if not self.is_whole:
            return y
        features = self.splits["weight"].shape[-1 if self.is_transposed else 0]
        return self.region.join_features(y, Split(shape=(*y.shape[:-1], features), dim=y.ndim - 1))


class RowLinear(SplitLayer):
    """A linear layer with some of the inputs, where a split part ends."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' products, and the bias once."""
        if self.is_whole:
            x = self.region.take_features(x, Split(shape=tuple(x.shape), dim=x.ndim - 1))
        y = self.region.leave(self._product(x))
        bias = cast("Tensor | None", self.bias)
        if bias is None:
            return y
        if self.region.is_sequence:
            (bias,) = self.region.share(bias)
        return y + bias.to(y.dtype)


class _Vocabulary(SplitLayer):
    """A layer with some rows of the vocabulary."""

    gathers_logits: bool

    def project(self, x: Tensor) -> SplitLogits | Tensor:
        """Returns split logits, or gathered ones where this was asked for."""
        bias = cast("Tensor | None", self._parameters.get("bias"))
        local = self._product(self.region.enter(x, [self]), bias)
        logits = SplitLogits(local, self.region.comm, self.own_range[0], self.splits["weight"].shape[0])
        return logits.gather() if self.gathers_logits else logits


class VocabularyEmbedding(_Vocabulary):
    """An embedding with some of the rows; ``project`` is that of an output layer that is tied to it."""

    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the rows of all tokens, each from the rank that has it."""
        first, last = self.own_range
        is_own = (tokens >= first) & (tokens < last)
        rows = super().forward(torch.where(is_own, tokens - first, 0))
        return self.region.leave(rows * is_own[..., None])

    def reset_parameters(self) -> None:
        """As for every layer; the row of padding is found by its place in the whole."""
        first, _ = self.own_range
        local, self.padding_idx = self.padding_idx, None if self.padding_idx is None else self.padding_idx + first
        try:
            super().reset_parameters()
        finally:
            self.padding_idx = local


class VocabularyHead(_Vocabulary):
    """An output layer with the logits of some tokens."""

    forward = _Vocabulary.project


class SplitExperts(nn.Module):
    """Experts with some of their inner features. Ranks route alike, and each has a part of every token's result."""

    region: TensorRegion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the sum of the ranks' results; what came in with a gradient gets that of all ranks."""
        enter = functools.partial(tree_map_only, Tensor, self.region.enter)
        return self.region.leave(super().forward(*enter(args), **enter(kwargs)))


class PartialLayer(SplitLayer):
    """A layer with some of the inputs, or experts with some inner features, whose sum is left to the module above."""

    def forward(self, *args: Tensor) -> Tensor:
        return self._product(*args) if isinstance(self, nn.Linear) else super().forward(*args)


class SplitRouter(nn.Module):
    """A router inside of a split part: whole on every rank, and so are its gradients.

    Ranks route alike. Gradients of weights are parts, and are summed; all else that a router learns from, such as the
    balance of experts, ranks have whole. So that of its input is whole, of which the entrance's sum takes shares.
    """

    region: TensorRegion

    def forward(self, tokens: Tensor) -> Any:
        ranks = self.region.comm.size
        found = super().forward(moved(tokens, same, lambda gradient: gradient / ranks))
        return replace(found, weights=self.region.sum_back(found.weights))


class SharedLayer(nn.Module):
    """A layer whose parameters are whole, and work on a part of the stream or of the heads."""

    region: TensorRegion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer with parameters whose gradients are summed over the ranks."""
        names = [name for name, parameter in self._parameters.items() if parameter is not None]
        shared = self.region.share(*(cast("Tensor", getattr(self, name)) for name in names))
        # An entry of the object's own hides the parameter of this name, as modules look there first.
        vars(self).update(zip(names, shared, strict=True))
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in names:
                del vars(self)[name]


class SplitNorm(SplitLayer):
    """An RMS norm with some of the features, over those of all ranks: one sum for each token, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        weight = cast("Tensor", self.weight)
        wide = x.to(torch.promote_types(weight.dtype, torch.float32))
        squares = self.region.sum_back(wide.square().sum(-1, keepdim=True), is_summed=True)
        scale = (squares / self.splits["weight"].shape[0] + cast("float", self.eps)).rsqrt()
        return (wide * scale * weight).to(x.dtype)


class SequencePositions(SharedLayer):
    """An embedding of positions, of which a rank looks up those of its part of the sequence."""

    def forward(self, positions: Tensor) -> Any:
        """Returns the embeddings of this rank's positions."""
        comm = self.region.comm
        return super().forward(positions.chunk(comm.size, -1)[comm.rank])


_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class SplitLogits:
    """This rank's part of the logits: those of the tokens from ``first`` on, in the last dim of ``local``."""

    local: Tensor
    comm: Communicator
    first: int
    vocab_size: int

    @property
    def shape(self) -> torch.Size:
        """The shape of all ranks' logits together."""
        return torch.Size((*self.local.shape[:-1], self.vocab_size))

    def cross_entropy(self, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Returns the summed cross entropy, the same on every rank; targets of ``ignore_index`` count nothing."""
        rows = self.local.reshape(-1, self.local.shape[-1])
        flat = targets.reshape(-1)
        if rows.shape[0] != flat.shape[0]:
            raise UsageError(
                f"{flat.shape[0]} targets for the logits of {rows.shape[0]} tokens\n  each token has one target\n"
                "  give targets of the logits' shape without its last dim"
            )
        if flat.device.type == "cpu":
            check_targets(flat, self.vocab_size, ignore_index)
        if rows.dtype in _HALF:  # sums and exponentials need more digits
            rows = rows.float()
        apply: Callable[..., Tensor] = _SplitCrossEntropy.apply
        return apply(rows, flat, self.comm, self.first, ignore_index)

    @torch.no_grad()
    def argmax(self, dim: int = -1) -> Tensor:
        """Returns the token of the largest logit, the first of equals; along the last dim alone."""
        if dim not in (-1, self.local.ndim - 1):
            raise UsageError(
                f"argmax(dim={dim}) of split logits\n  ranks have parts of the vocabulary, which is the last dim\n"
                "  take argmax(-1), or gather() for everything else"
            )
        value, index = self.local.max(-1)
        values = value.new_empty(self.comm.size, *value.shape)
        indices = index.new_empty(self.comm.size, *index.shape)
        works = self.comm.all_gather(values, value.contiguous()), self.comm.all_gather(indices, index + self.first)
        for work in works:
            work.wait()
        # The first of equals is on the first rank: within a rank max() gives any of them, as torch's argmax does.
        owner = (values == values.max(0).values).int().argmax(0, keepdim=True)
        return indices.gather(0, owner).squeeze(0)

    def gather(self) -> Tensor:
        """Returns the logits of the whole vocabulary, on every rank. What follows must be the same on all of them."""
        split, comm = Split(shape=tuple(self.shape), dim=self.local.ndim - 1), self.comm
        first, last = self.first, self.first + self.local.shape[-1]
        # Not a method of this object, which would keep the logits until backward, where every rank has all gradients.
        return moved(self.local, lambda local: split.gather(local, comm), lambda gradient: gradient[..., first:last])

    def __mul__(self, factor: float) -> SplitLogits:
        return replace(self, local=self.local * factor)

    def __truediv__(self, divisor: float) -> SplitLogits:
        return replace(self, local=self.local / divisor)

    @classmethod
    def __torch_function__(cls, function: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise UsageError(
            f"torch.{function.__name__} of split logits\n  each rank has a part of the vocabulary\n"
            "  gather() them, or let apply_tensor_parallel(..., gathers_logits=True) make the model return whole logits"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"split logits have no {name!r}: this rank has a part of the vocabulary. They have cross_entropy(targets), "
            "argmax() and gather(); apply_tensor_parallel(..., gathers_logits=True) makes the model return whole logits"
        )


def causal_loss(
    logits: SplitLogits,
    labels: Tensor | None,
    vocab_size: int | None = None,  # those of the logits; as the library calls it
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_others: Any,
) -> Tensor:
    """Returns the loss of Hugging Face's causal models from ``labels=``: each token predicts the next one."""
    del vocab_size
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(cast("Tensor", labels), (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(logits.local.device)
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return logits.cross_entropy(targets, ignore_index) / count


class _SplitCrossEntropy(torch.autograd.Function):
    """The summed cross entropy of rows of split logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, comm: Communicator, first: int, ignore_index: int) -> Tensor:
        peak = rows.amax(-1)
        comm.all_reduce(peak, "max").wait()
        shifted = rows - peak[:, None]
        counts = targets != ignore_index
        is_own = counts & (targets >= first) & (targets < first + rows.shape[1])
        index = torch.where(is_own, targets - first, 0)[:, None]
        own = shifted.gather(1, index).squeeze(1) * is_own
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), own))
        comm.all_reduce(sums).wait()
        ctx.save_for_backward(exponentials.div_(sums[0, :, None]), index, is_own, counts)
        return torch.where(counts, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, index, is_own, counts = ctx.saved_tensors
        rows = probabilities * counts[:, None]
        rows.scatter_add_(1, index, -is_own[:, None].to(rows.dtype))
        return rows.mul_(gradient), None, None, None, None
