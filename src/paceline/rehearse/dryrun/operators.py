"""From an operator of torch to the kernel that a device runs for it: its family, sizes and bytes.

products         mm, addmm, bmm, baddbmm, linear: (rows, inner, columns); convolutions as the product they are
views, shapes    nothing: no element is touched
all others       bytes of every tensor that is read, and of every one that is written
embedding        the rows that are read, not the table
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.cluster.kernels import Family, Operation

Number = Callable[[torch.Tensor], int]

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
_NO_WORK = ("empty", "new_empty", "resize_", "set_", "_local_scalar_dense", "lift_fresh", "_unsafe_view", "detach")
_ONLY_WRITTEN = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "uniform_", "normal_")
_FAMILIES: tuple[tuple[Family, tuple[str, ...]], ...] = (
    ("optimizer", ("_fused_",)),
    ("random", ("bernoulli", "uniform", "normal", "rand", "native_dropout", "multinomial", "exponential")),
    ("embedding_backward", ("embedding_dense_backward", "index_put", "scatter", "index_add")),
    ("embedding", ("embedding", "index", "gather")),
    ("norm_backward", ("native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward")),
    ("norm_backward", ("_fused_rms_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")),
    ("norm", ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm", "_fused_rms_norm")),
    ("norm", ("batch_norm", "cudnn_batch_norm")),
    ("softmax", ("_softmax", "_log_softmax", "logsumexp", "nll_loss")),
    ("curve_backward", ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "elu_backward")),
    ("curve", ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "sin", "cos", "pow", "rsqrt", "sqrt", "elu")),
    ("reduction", ("sum", "mean", "amax", "max", "min", "var", "norm", "linalg_vector_norm", "_foreach_norm")),
    ("reduction", ("argmax", "any", "all", "cumsum")),
    ("convert", ("_to_copy",)),
    ("strided", ("clone", "cat", "stack", "copy_", "_foreach_copy_", "contiguous", "pad", "constant_pad", "flip")),
)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype as devices are described; what is not narrower counts as fp32."""
    return _DTYPES.get(dtype, "fp32")


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    # What operators take and return is this plain; torch's own walk through trees takes ten times as long.
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            if isinstance(each, torch.Tensor):
                yield each
            elif isinstance(each, list | tuple | dict):
                yield from tensors_of(each)
    elif isinstance(tree, dict):
        yield from tensors_of(tuple(tree.values()))


class Operators:
    """Turns calls into kernels. ``number`` gives a tensor's memory a number."""

    def __init__(self, number: Number) -> None:
        self._number = number

    def kernels(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Operation]:
        if is_free(func):
            return []
        name = func._overloadpacket.__name__
        found = self._products(name, args, result)
        if found is not None:
            return found
        inputs, outputs = list(tensors_of((args, kwargs))), list(tensors_of(result))
        if name.endswith("_") and not outputs:  # over lists, in place
            outputs = list(tensors_of(args[:1]))
        if not inputs and not outputs:
            return []
        return [self._memory(name, args, inputs, outputs)]

    def attention(self, tensors: Sequence[torch.Tensor], *, is_causal: bool, is_back: bool) -> Operation:
        """Returns fused attention on query, key, value and all else; the last tensor is written."""
        query, key = tensors[:2]
        *before, length, size = query.shape
        heads = before[-1] if before else 1
        return Operation(
            name="attention_backward" if is_back else "attention",
            family="attention_backward" if is_back else "attention",
            dtype=dtype_name(query.dtype),
            sizes=(math.prod(before[:-1]), heads, length, size),
            is_causal=is_causal and key.shape[-2] == length,
            reads=self._sizes(tensors[:-1]),
            writes=self._sizes(tensors[-1:]),
        )

    def _memory(
        self, name: str, args: Sequence[Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> Operation:
        family = _family(name)
        if name.startswith(_ONLY_WRITTEN):
            written = {id(tensor) for tensor in tensors_of(args[:1])}
            inputs = [tensor for tensor in inputs if id(tensor) not in written]
        if family == "embedding" and name in ("embedding", "index", "gather"):
            inputs = [tensor for tensor in inputs if not tensor.is_floating_point()] + outputs[:1]
        most = max((*outputs, *inputs), key=torch.Tensor.numel)
        lists = [len(each) for each in args[:1] if isinstance(each, list | tuple)]
        return Operation(
            name=name,
            family=family,
            dtype=dtype_name(most.dtype),
            tensors=max(lists, default=1) or 1,
            reads=self._sizes(inputs),
            writes=self._sizes(outputs),
        )

    def _products(self, name: str, args: Sequence[Any], result: Any) -> list[Operation] | None:
        if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
            left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            batch = left.shape[0] if left.ndim == 3 else 1
            sizes = (left.shape[-2], left.shape[-1], right.shape[-1])
            return [self._product(name, sizes, [left, right], result, batch, _layout(left, right))]
        if name == "linear":
            left, right = args[:2]
            sizes = (left.numel() // left.shape[-1], left.shape[-1], right.shape[0])
            return [self._product(name, sizes, [left, right], result, 1, "nt")]
        if name in ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"):
            return [self._product(name, _convolution(args[1], result), [args[0], args[1]], result)]
        if name == "convolution_backward":
            rows, inner, columns = _convolution(args[2], args[0])
            made = [(rows, columns, inner), (columns, rows, inner)]
            return [
                self._product(name, sizes, [args[0], args[2 - place]], output)
                for place, (sizes, output) in enumerate(zip(made, result, strict=False))
                if output is not None
            ]
        return None

    def _product(
        self,
        name: str,
        sizes: tuple[int, int, int],
        inputs: list[torch.Tensor],
        output: torch.Tensor,
        batch: int = 1,
        layout: str = "",
    ) -> Operation:
        return Operation(
            name=name,
            family="matmul",
            dtype=dtype_name(inputs[0].dtype),
            sizes=sizes,
            batch=batch,
            layout=layout,
            reads=self._sizes(inputs),
            writes=self._sizes([output]),
        )

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        return tuple((self._number(tensor), _touched(tensor)) for tensor in tensors)


def _touched(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor; what is expanded is there once."""
    if 0 not in tensor.stride():
        return tensor.numel() * tensor.element_size()
    counts = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(counts) * tensor.element_size()


def _layout(left: torch.Tensor, right: torch.Tensor) -> str:
    def is_turned(matrix: torch.Tensor) -> bool:
        return matrix.stride(-1) != 1 and matrix.stride(-2) == 1

    return ("t" if is_turned(left) else "n") + ("t" if is_turned(right) else "n")


def _convolution(weight: torch.Tensor, output: torch.Tensor) -> tuple[int, int, int]:
    """Returns a convolution as a product of (places, kernel) by (kernel, channels); groups make the kernel shorter."""
    channels = weight.shape[0]
    return output.numel() // channels, weight.numel() // channels, channels


@functools.cache
def is_free(func: Any) -> bool:
    """Says whether an operation touches no element: a view, or memory that nobody has written yet."""
    name = func.__name__.partition(".")[0]
    returns = func._schema.returns
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return is_view or name.startswith(_NO_WORK)


@functools.cache
def _family(name: str) -> Family:
    plain = name.removeprefix("_foreach_").removesuffix("_")
    for family, starts in _FAMILIES:
        if any(name.startswith(start) or plain == start for start in starts):
            return family
    return "pointwise"
