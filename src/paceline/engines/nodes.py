"""Nodes of autograd: what ranks exchange where the stream meets split layers, and weight gradients that come later.

[Note: overlap] The sum of the input's gradient is needed by what lies before the split part, but not by the weight
gradients of the column layers. Autograd runs what was recorded last first. So entering the split part records, in this
order: a node that waits, a node for each column layer that computes its weight gradient, a node that starts the sum.
Backward meets them the other way round: the sum is on its way while the weight gradients are computed. Their factors
wait in memory from one node to the other: the layer's input, which is there anyway, and the gradient of its output.

Backward of a pipeline in two parts:

    input part    the gradient of a stage's inputs: half of the work, and all that anybody waits for
    weight part   the gradients of the weights of its linear layers, x^T g: whenever there is nothing better to do

A linear layer under ``DeferredWeights`` leaves its weight's gradient out and notes the two factors, which a stage keeps
from the input part to the weight part. The gradients of all other parameters are cheap and fall out of the input part.
The weight part hands all gradients to autograd at once, as one backward over the parameters: an engine's hooks see each
microbatch's gradients together, as they would without the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.overrides import TorchFunctionMode

from paceline.comm.base import DONE, Communicator, Work, unwatched
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.engines.tensor.layout import Split

Change = Callable[[Tensor], Tensor]
Tensors = Sequence[Tensor]
Leave = Callable[[Tensor, Tensor], None]  # takes the factors of a weight gradient


def moved(x: Tensor, forward: Change, backward: Change) -> Tensor:
    """Returns ``forward(x)``, which autograd does not see; what comes back is ``backward(gradient)``."""
    run: Callable[..., Tensor] = _Moved.apply
    return run(x, forward, backward)


def same(x: Tensor) -> Tensor:
    """Returns the tensor, as a view: a node may not return its own input."""
    return x.view_as(x)


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Change, backward: Change) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient), None, None


class _LateLinear(Function):
    """A linear layer; backward gives the gradients of input and bias, and calls ``leave`` with the weight's factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, leave: Leave) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.leave = leave
        return F.linear(x, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        ctx.leave(x, gradient)
        # Where a node stands before the matrix, it must run: this takes no memory, and autograd wants the shape.
        nothing = gradient.new_zeros(()).expand_as(matrix) if ctx.needs_input_grad[1] else None
        bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ matrix if ctx.needs_input_grad[0] else None, nothing, bias, None


def late_linear(x: Tensor, matrix: Tensor, bias: Tensor | None, leave: Leave) -> Tensor:
    """Returns what ``F.linear`` would; of the weight's gradient, backward leaves the factors ``x`` and the output's."""
    run: Callable[..., Tensor] = _LateLinear.apply
    return run(x, matrix, bias, leave)


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of a linear layer's weight from its factors."""
    return _rows(gradient).t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(slots=True)
class WeightPart:
    """What one forward leaves for the weight part of its backward."""

    factors: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # weight, x, g
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def multiply(self) -> None:
        for weight, x, gradient in self.factors:
            self.add(weight, weight_gradient(x, gradient).to(weight.dtype))
        self.factors.clear()

    def give(self, parameters: Iterable[Tensor]) -> bool:
        """Gives parameters their gradients; returns if there were any."""
        receivers = set(parameters)
        found = [(each, self.gradients.pop(each)) for each in list(self.gradients) if each in receivers]
        if found:
            torch.autograd.backward([parameter for parameter, _ in found], [gradient for _, gradient in found])
        return bool(found)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        held = self.gradients.get(parameter)
        self.gradients[parameter] = gradient if held is None else held + gradient


class DeferredWeights(TorchFunctionMode):
    """Under it, linear layers leave the gradients of their weights to ``part``."""

    def __init__(self, part: WeightPart) -> None:
        super().__init__()
        self._part = part

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_linear = function is F.linear and torch.is_grad_enabled()
        return (self._linear if is_linear else function)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # as torch's
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return F.linear(input, weight, bias)
        x, kind = input, input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        factors = self._part.factors
        return late_linear(x, weight.detach().to(x.dtype), bias, lambda x, g: factors.append((weight, x, g)))


def input_part(
    roots: Tensors, gradients: Sequence[Tensor | None], inputs: Tensors, parameters: Tensors, part: WeightPart
) -> list[Tensor | None]:
    """Runs the input part of a backward: returns the gradients of ``inputs``, and leaves the rest to ``part``.

    A checkpointed part runs again in there, so linear layers are deferred again: ``torch.autograd.grad`` would not.
    """
    wanted = (*inputs, *parameters)
    run: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.Variable._execution_engine.run_backward
    with DeferredWeights(part):
        found = run(tuple(roots), tuple(gradients), False, False, wanted, allow_unreachable=True, accumulate_grad=False)
    for parameter, gradient in zip(parameters, found[len(inputs) :], strict=True):
        if gradient is not None:
            part.add(parameter, gradient)
    return list(found[: len(inputs)])


Product = Callable[[Tensor, Tensor | None], Tensor]  # of an input, with a bias: what ``F.linear`` would return


def record_late(matrix: Tensor) -> Product:
    """Records the node of a weight's gradient; returns the product with that weight, which is called once."""
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


class StreamReader(Protocol):
    """A layer that reads the stream as it enters a split part."""

    def late_matrix(self) -> Tensor | None: ...


_LENGTH = -2  # the dim of a stream (batch, length, width) along which a sequence is split


class TensorRegion:
    """The ranks that share the layers of a model, and how the stream enters and leaves their split parts."""

    def __init__(self, comm: Communicator, *, is_sequence: bool) -> None:
        self.comm = comm
        self.is_sequence = is_sequence
        self.late: dict[StreamReader, Product] = {}  # of layers that the stream has come to and not yet passed
        self._entered: tuple[Tensor, Tensor] | None = None  # the stream before and behind where it entered last
        # No compiler follows a conversation between ranks. Said here, as a decorator would load it with this file.
        for name in ("enter", "leave", "sum_back", "take", "join", "share", "join_features", "take_features"):
            setattr(self, name, cast("Any", torch.compiler).disable(getattr(self, name)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRegion:
        return self

    def enter(self, x: Tensor, layers: Sequence[StreamReader] = ()) -> Tensor:
        """Returns the whole stream at the beginning of a split part; backward sums its gradient over the ranks.

        ``layers`` read the stream: while it is summed, their weight gradients are computed. See [Note: overlap].
        """
        for layer in layers:
            self.late.pop(layer, None)  # of a pass that did not come to the layer
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._gather(x) if self.is_sequence else x
        total = _TensorSum(self.comm)
        x = moved(x, same, total.wait)
        # A schedule that computes weight gradients later watches for ``F.linear`` by itself.
        for layer in layers if torch._C._len_torch_function_stack() == 0 else ():
            if (matrix := layer.late_matrix()) is not None:
                self.late[layer] = record_late(matrix)
        return moved(x, self._gather, total.start_scatter) if self.is_sequence else moved(x, same, total.start)

    def enter_before(self, layers: Sequence[StreamReader], x: Tensor) -> Tensor:
        """Enters before these layers, once for all that read the same. Compiled code orders backward by itself."""
        if torch.compiler.is_compiling():
            return self.enter(x)
        if self._entered is None or self._entered[0] is not x:
            self._entered = x, self.enter(x, layers)
        return self._entered[1]

    def leave(self, x: Tensor) -> Tensor:
        """Sums what the ranks computed at the end of a split part, and returns the stream: whole, or this rank's."""
        self._entered = None
        return moved(x, self._scatter_sum, self._gather) if self.is_sequence else moved(x, self._sum, same)

    def sum_back(self, x: Tensor, *, is_summed: bool = False) -> Tensor:
        """Returns what is the same on all ranks, or is summed to be; each computes a part from it; backward sums."""
        return moved(x, self._sum if is_summed else same, self._sum)

    def take(self, x: Tensor) -> Tensor:
        """Returns this rank's part of a stream that all ranks have whole."""
        return moved(x, self._part, self._gather)

    def join(self, x: Tensor) -> Tensor:
        """Returns the whole stream from the ranks' parts; what follows must be the same on all ranks."""
        return moved(x, self._gather, self._part)

    def join_features(self, x: Tensor, split: Split) -> Tensor:
        """Returns all ranks' features of the last dim; what follows is the same on all, and so is its gradient."""
        comm, ((first, last),) = self.comm, split.spans(self.comm.rank, self.comm.size)
        return moved(x, lambda x: split.gather(x, comm), lambda gradient: gradient[..., first:last])

    def take_features(self, x: Tensor, split: Split) -> Tensor:
        """Returns this rank's features of what is whole on all ranks."""
        comm, ((first, last),) = self.comm, split.spans(self.comm.rank, self.comm.size)
        return moved(x, lambda x: x[..., first:last].contiguous(), lambda gradient: split.gather(gradient, comm))

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
        total = _TensorSum(self.comm)
        part = total.start_scatter(x)
        with unwatched():
            return total.wait(part)

    def _gather(self, x: Tensor) -> Tensor:
        parts, part = x.new_empty(self.comm.size, *x.shape), x.detach().contiguous()
        with unwatched():
            self.comm.all_gather(parts, part).wait()
        return torch.cat(parts.unbind(0), _LENGTH)

    def _part(self, x: Tensor) -> Tensor:
        return x.chunk(self.comm.size, _check_length(x, self.comm))[self.comm.rank].contiguous()


class _TensorSum:
    """A sum over the ranks: of a gradient, between the node of backward that starts it and the one that waits."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._work: Work = DONE

    def start(self, gradient: Tensor) -> Tensor:
        """Starts the all-reduce; nobody may look at the result before ``wait``."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        self._work = self._comm.all_reduce(total)
        return total

    def start_scatter(self, x: Tensor) -> Tensor:
        """Starts the reduce-scatter along the sequence; returns where this rank's part will be."""
        parts = torch.stack(x.chunk(self._comm.size, _check_length(x, self._comm)))
        part = torch.empty_like(parts[0])
        with unwatched():
            self._work = self._comm.reduce_scatter(part, parts)
        return part

    def wait(self, total: Tensor) -> Tensor:
        self._work.wait()
        self._work = DONE
        return total


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


def _check_length(x: Tensor, comm: Communicator) -> int:
    if x.shape[_LENGTH] % comm.size:
        raise UsageError(
            f"a sequence of {x.shape[_LENGTH]} tokens does not divide by the tensor degree {comm.size}\n"
            "  sequence parallelism gives every rank the same number of tokens\n"
            f"  pad or cut the sequences to a multiple of {comm.size}, or set parallel.sequence_parallel = false"
        )
    return _LENGTH
