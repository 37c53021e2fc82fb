"""Tensor parallelism: T ranks hold a part of every layer, and compute one model together.

    column   y_r = x W_r^T            a rank has some of the outputs: of the heads, or of the MLP's features
    row      y   = sum_r x_r W_r^T    a rank has the inputs that its columns gave: the sum goes over the ranks

A column layer followed by a row layer needs one sum in forward, of the row layer's output, and one in backward, of the
gradient of the column layers' input, which several of them may share (queries, keys and values). For a stream of B
bytes (batch x length x width), a transformer block sends per rank

    forward     2 all-reduces of B         4 B (T-1)/T      after attention, after the MLP
    backward    2 all-reduces of B         4 B (T-1)/T      of the gradients of their inputs

and has 1/T of its parameters and of the memory of what is inside. *Sequence parallelism* splits the parts between along
the sequence: where a split part begins there is an all-gather, where it ends a reduce-scatter, which is the same number
of bytes, and norms and the stream itself take 1/T of their memory too. It pays while a block's products take longer
than its four sums: within a host.

The embedding has some rows of the vocabulary: a token's row comes from the rank that has it, zeros from the others. The
output layer has the same rows, and its logits stay split (``loss.py``).

[Note: overlap] The sum of the input's gradient is needed by what lies before the split part, but not by the weight
gradients of the column layers. Autograd runs what was recorded last first. So entering the split part records, in this
order: a node that waits, a node for each column layer that computes its weight gradient, a node that starts the sum.
Backward meets them the other way round: the sum is on its way while the weight gradients are computed
(``late.py``).

[Note: complete gradients] Every parameter's gradient is complete when autograd delivers it, and for one that is not
split the same on all ranks, to the bit. Where a whole parameter works on a part of the stream (norms between, under
sequence parallelism), it goes through ``TensorRegion.share``, whose backward sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from paceline.comm.base import DONE, Communicator, Work
from paceline.engines.float8 import float8_linear
from paceline.engines.nodes import late_linear, moved, same, weight_gradient
from paceline.engines.tensor.layout import Split, split_range
from paceline.engines.tensor.loss import SplitLogits
from paceline.errors import UsageError
from paceline.models.lora import A, Adapted

# A linear layer whose weight gradient is computed by a node of its own, recorded before the product's.
#
# Autograd runs first what was recorded last: between the two nodes others may run, such as one that starts a message.
# See [Note: overlap] below. The factors wait in memory from one node to the other: the layer's input,
# which is there anyway, and the gradient of its output.


Product = Callable[[Tensor, Tensor | None], Tensor]  # of an input, with a bias: what ``F.linear`` would return


def may_split_backward() -> bool:
    """Whether nobody else watches for ``F.linear``: a schedule that computes weight gradients later does by itself."""
    return torch._C._len_torch_function_stack() == 0


def record_late(matrix: Tensor) -> Product:
    """Records the node of a weight's gradient; returns the product with that weight, which is called once.

    Under autocast the product reads a copy of lower precision, as torch's own would.
    """
    kind = matrix.device.type
    is_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    is_cast = is_autocast and matrix.dtype != torch.float64
    left: list[tuple[int, Tensor, Tensor]] = []  # the factors, with the pass of backward that left them

    def leave(x: Tensor, gradient: Tensor) -> None:
        left.append((torch._C._current_graph_task_id(), x, gradient))

    def compute(_: Tensor) -> Tensor:
        """Returns the gradient, whatever comes in. What a pass left that asked for no weight gradients is dropped."""
        task = torch._C._current_graph_task_id()
        terms = [weight_gradient(x, gradient) for each, x, gradient in left if each == task]
        left.clear()
        return sum(terms[1:], terms[0])

    # Only the product holds this weight: a node that did would keep itself alive.
    weight = moved(matrix.to(torch.get_autocast_dtype(kind)) if is_cast else matrix, same, compute)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        if is_cast:
            x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
        return late_linear(x, weight, bias, leave)

    return product


_LENGTH = -2  # the dim of a stream (batch, length, width) along which a sequence is split


class TensorRegion:
    """The ranks that share the layers of a model, and how the stream enters and leaves their split parts."""

    def __init__(self, comm: Communicator, *, is_sequence: bool) -> None:
        self.comm = comm
        self.is_sequence = is_sequence
        self.late: dict[nn.Module, Product] = {}  # of layers that the stream has come to and not yet passed
        # No compiler follows a conversation between ranks. Said here, as a decorator would load it with this file.
        for name in ("enter", "leave", "take", "join", "share"):
            setattr(self, name, cast("Any", torch.compiler).disable(getattr(self, name)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRegion:
        return self

    def enter(self, x: Tensor, layers: Sequence[SplitLayer] = ()) -> Tensor:
        """Returns the whole stream at the beginning of a split part; backward sums its gradient over the ranks.

        ``layers`` read the stream: while it is summed, their weight gradients are computed. See [Note: overlap].
        """
        for layer in layers:
            self.late.pop(layer, None)  # of a pass that did not come to the layer
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._gather(x) if self.is_sequence else x
        total = _TensorSum(self.comm)
        x = moved(x, same, total.wait)
        for layer in layers if may_split_backward() else ():
            # A product of 8 bits computes its weight gradient in its own node, which casts the gradient once.
            if cast("Tensor", layer.weight).requires_grad and layer.float8_by_row is None:
                self.late[layer] = record_late(layer.matrix)
        return moved(x, self._gather, total.start_scatter) if self.is_sequence else moved(x, same, total.start)

    def leave(self, x: Tensor) -> Tensor:
        """Sums what the ranks computed at the end of a split part, and returns the stream: whole, or this rank's."""
        return moved(x, self._scatter_sum, self._gather) if self.is_sequence else moved(x, self._sum, same)

    def take(self, x: Tensor) -> Tensor:
        """Returns this rank's part of a stream that all ranks have whole."""
        return moved(x, self._part, self._gather)

    def join(self, x: Tensor) -> Tensor:
        """Returns the whole stream from the ranks' parts; what follows must be the same on all ranks."""
        return moved(x, self._gather, self._part)

    def share(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Returns parameters for use on a part of the stream or of the heads; backward sums their gradients."""
        if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)):
            return parameters
        run: Callable[..., tuple[Tensor, ...]] = _Share.apply
        return run(self.comm, *parameters)

    # What moves, in forward or in backward: a gather undoes what a part or a sum of parts has done.

    def _sum(self, x: Tensor) -> Tensor:
        # Not in place: selective checkpointing keeps the product that came in.
        total = x.clone(memory_format=torch.contiguous_format)
        with unwatched():
            self.comm.all_reduce(total).wait()
        return total

    def _scatter_sum(self, x: Tensor) -> Tensor:
        part, work = _start_scatter(x, self.comm)
        with unwatched():
            work.wait()
        return part

    def _gather(self, x: Tensor) -> Tensor:
        parts, part = x.new_empty(self.comm.size, *x.shape), x.detach().contiguous()
        with unwatched():
            self.comm.all_gather(parts, part).wait()
        return torch.cat(parts.unbind(0), _LENGTH)

    def _part(self, x: Tensor) -> Tensor:
        return x.chunk(self.comm.size, _check_length(x, self.comm))[self.comm.rank].contiguous()


class _TensorSum:
    """The sum of a gradient over the ranks, between the node of backward that starts it and the one that waits."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._work: Work = DONE

    def start(self, gradient: Tensor) -> Tensor:
        """Starts the all-reduce; nobody may look at the result before ``wait``."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        self._work = self._comm.all_reduce(total)
        return total

    def start_scatter(self, gradient: Tensor) -> Tensor:
        """Starts the reduce-scatter, of which the result is this rank's part."""
        part, self._work = _start_scatter(gradient, self._comm)
        return part

    def wait(self, gradient: Tensor) -> Tensor:
        """Waits for the sum in ``gradient``."""
        self._work.wait()
        self._work = DONE
        return gradient


class _Share(torch.autograd.Function):
    """Identity of several tensors; backward sums their gradients over the ranks, in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        ctx.comm.all_reduce(flat).wait()
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        return None, *(p.view_as(g).to(g.dtype) for p, g in zip(pieces, gradients, strict=True))


def _start_scatter(x: Tensor, comm: Communicator) -> tuple[Tensor, Work]:
    """Starts a reduce-scatter along the sequence; returns where this rank's part will be."""
    parts = torch.stack(x.chunk(comm.size, _check_length(x, comm)))
    part = torch.empty_like(parts[0])
    with unwatched():
        return part, comm.reduce_scatter(part, parts)


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """Surrounds what a communicator computes, which differs from rank to rank and from one run to the next.

    Selective checkpointing compares the operators of a block's first run with those of its second.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def _check_length(x: Tensor, comm: Communicator) -> int:
    if x.shape[_LENGTH] % comm.size:
        raise UsageError(
            f"a sequence of {x.shape[_LENGTH]} tokens does not divide by the tensor degree {comm.size}\n"
            "  sequence parallelism gives every rank the same number of tokens\n"
            f"  pad or cut the sequences to a multiple of {comm.size}, or set parallel.sequence_parallel = false"
        )
    return _LENGTH


# Layers. Each is mixed into the class of the layer that it replaces, which knows how it is initialised.


class SplitLayer(nn.Module):
    """A layer that has a part of its parameters: what the kinds below have in common."""

    region: TensorRegion  # of a vocabulary layer: as the stream is behind the embedding, and before the output layer
    splits: Mapping[str, Split]  # of its own parameters
    is_transposed: bool = False  # the weight is (inputs, outputs)
    float8_by_row: bool | None = None  # products read operands of 8 bits, with one scale or one for each row

    def reset_parameters(self) -> None:
        """Gives the parameters this rank's part of what the plain layer would draw.

        For a moment the layer is whole. So a model that was built on the meta device gets the plain model's values.
        """
        local = dict(self._parameters)
        comm = self.region.comm
        for name, split in self.splits.items():
            self._parameters[name] = nn.Parameter(cast("Tensor", local[name]).new_empty(split.shape))
        try:
            super().reset_parameters()  # type: ignore[misc]
            with torch.no_grad():
                for name, split in self.splits.items():
                    whole = cast("Tensor", self._parameters[name])
                    cast("Tensor", local[name]).copy_(split.cut(whole, comm.rank, comm.size))
        finally:
            self._parameters.update(local)

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

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self._plain_product(x, bias)
        if not isinstance(self, Adapted):
            return y
        # One matrix of the adapter is split as the weight is; the other is whole, and its gradients are of parts.
        is_first_split = A in self.splits
        (shared,) = self.region.share(self.lora_b if is_first_split else self.lora_a)
        return y + (self.added(x, self.lora_a, shared) if is_first_split else self.added(x, shared, self.lora_b))

    def _plain_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.float8_by_row is not None:
            return float8_linear(x, self.matrix, bias, by_row=self.float8_by_row)
        late = None if torch.compiler.is_compiling() else self.region.late.pop(self, None)
        return F.linear(x, self.matrix, bias) if late is None else late(x, bias)


class ColumnLinear(SplitLayer):
    """A linear layer with some of the outputs. What it reads has entered the split part."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's outputs."""
        return self._product(x, cast("Tensor | None", self.bias))


class RowLinear(SplitLayer):
    """A linear layer with some of the inputs, where a split part ends."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' products, and the bias once."""
        y = self.region.leave(self._product(x))
        bias = cast("Tensor | None", self.bias)
        if bias is None:
            return y
        if self.region.is_sequence:
            (bias,) = self.region.share(bias)
        return y + bias.to(y.dtype)


class VocabularyEmbedding(SplitLayer):
    """An embedding with some of the rows."""

    gathers_logits: bool
    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the rows of all tokens, each from the rank that has it."""
        first, last = self.own_range
        is_own = (tokens >= first) & (tokens < last)
        rows = super().forward(torch.where(is_own, tokens - first, 0))
        return self.region.leave(rows * is_own[..., None])

    def project(self, x: Tensor) -> SplitLogits | Tensor:
        """Returns the logits of an output layer that is tied to the embedding."""
        return _logits(self, x)

    def reset_parameters(self) -> None:
        """As for every layer; the row of padding is found by its place in the whole."""
        first, _ = self.own_range
        local, self.padding_idx = self.padding_idx, None if self.padding_idx is None else self.padding_idx + first
        try:
            super().reset_parameters()
        finally:
            self.padding_idx = local


class VocabularyHead(SplitLayer):
    """An output layer with the logits of some tokens."""

    gathers_logits: bool

    def forward(self, x: Tensor) -> SplitLogits | Tensor:
        """Returns split logits, or gathered ones where this was asked for."""
        return _logits(self, x)


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


class SequencePositions(SharedLayer):
    """An embedding of positions, of which a rank looks up those of its part of the sequence."""

    def forward(self, positions: Tensor) -> Any:
        """Returns the embeddings of this rank's positions."""
        comm = self.region.comm
        return super().forward(positions.chunk(comm.size, -1)[comm.rank])


def _logits(layer: VocabularyEmbedding | VocabularyHead, x: Tensor) -> SplitLogits | Tensor:
    bias = cast("Tensor | None", layer._parameters.get("bias"))
    local = layer._product(layer.region.enter(x, [layer]), bias)
    logits = SplitLogits(local, layer.region.comm, layer.own_range[0], layer.splits["weight"].shape[0])
    return logits.gather() if layer.gathers_logits else logits
