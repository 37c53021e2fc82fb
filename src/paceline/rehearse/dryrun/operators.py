"""From an operator of torch to the kernel that a device runs for it: its family, sizes and bytes.

products         mm, addmm, bmm, baddbmm, linear: (rows, inner, columns); convolutions as the product they are
views, shapes    nothing: no element is touched
all others       bytes of every tensor that is read, and of every one that is written
embedding        the rows that are read, not the table

Operators on tensors of given shapes are looked at once: blocks that are alike call the same ones again and again.

key              the operator; shape, strides and dtype of each tensor; plain values; which tensors are the same one
result           what an operator returns that makes new tensors, or its first argument where it writes to that
kernels          what a device runs for it, with the tensors by their places: arguments first, then results

torch works out the shape of a result in Python for most operators, which takes ten times as long as all else that a dry
run does. What follows from values, returns a view, or lies on another device is not remembered. A recording with what
is known and one without are the same, byte by byte.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from paceline.cluster.kernels import Family, Operation
from paceline.comm.dry.communicator import META

Number = Callable[[torch.Tensor], int]
Sizes = tuple[int, int, int]

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
_NO_WORK = ("empty", "new_empty", "resize_", "set_", "_local_scalar_dense", "lift_fresh", "_unsafe_view", "detach")
_ONLY_WRITTEN = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "uniform_", "normal_")
_FAMILIES: list[tuple[Family, list[str]]] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))


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


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns what an operator was given, by the names of its arguments."""
    return dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs


# Attention forward as an operator of its own, so that checkpointing keeps what it makes where it keeps products.
ATTENTION = "_scaled_dot_product_recorded"
_FUSED_ATTENTION = (ATTENTION, "_scaled_dot_product_flash_attention")  # of those that ranks share, torch's own
_LIBRARY = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"{ATTENTION}(Tensor query, Tensor key, Tensor value, bool is_causal) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, ATTENTION, "Meta")
def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:  # noqa: ARG001
    # Fused kernels write their output so that heads lie side by side, as the queries do that come out of a product.
    same = value.shape[-1] == query.shape[-1]
    return torch.empty_like(query) if same else query.new_empty(*query.shape[:-1], value.shape[-1])


class Operators:
    """Turns calls into kernels. ``number`` gives a tensor's memory a number."""

    def __init__(self, number: Number) -> None:
        self._number = number

    def kernels(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Operation]:
        if is_free(func):
            return []
        name = func._overloadpacket.__name__
        if name.startswith(_FUSED_ATTENTION):
            return [self._fused_attention(func, args, kwargs, result)]
        found = self._products(name, args, result)
        if found is not None:
            return found
        inputs, outputs = list(tensors_of((args, kwargs))), list(tensors_of(result))
        if name.endswith("_") and not outputs:  # over lists, in place
            outputs = list(tensors_of(args[:1]))
        if not inputs and not outputs:
            return []
        return _in_kernels(self._memory(name, args, inputs, outputs))

    def _fused_attention(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Operation:
        given = arguments_of(func, args, kwargs)
        inputs = [given[name] for name in ("query", "key", "value", "out", "grad_out") if name in given]
        outputs = tensors_of(result) if "grad_out" in given else [next(tensors_of(result))]
        return self.attention([*inputs, *outputs], is_causal=bool(given.get("is_causal")), is_back="grad_out" in given)

    def attention(self, tensors: Sequence[torch.Tensor], *, is_causal: bool, is_back: bool) -> Operation:
        """Returns fused attention on query, key, value and all else; the last tensor is written."""
        query, key = tensors[:2]
        *before, length, size = query.shape
        heads, keys = before[-1] if before else 1, key.shape[-2]
        is_square = keys == length
        return Operation(
            name="attention_backward" if is_back else "attention",
            family="attention_backward" if is_back else "attention",
            dtype=dtype_name(query.dtype),
            sizes=(math.prod(before[:-1]), heads, length, size),
            keys=0 if is_square else keys,
            is_causal=is_causal and is_square,
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
            layout="strided" if not lists and _is_strided(family, inputs, outputs) else "",
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
            return [self._product(name, _convolution(args[1], result), [args[0], args[1]], result, 1, _order(args[0]))]
        if name == "convolution_backward":
            rows, inner, columns = _convolution(args[2], args[0])
            made = [(rows, columns, inner), (columns, rows, inner)]
            return [
                self._product(name, sizes, [args[0], args[2 - place]], output, 1, _order(args[1]))
                for place, (sizes, output) in enumerate(zip(made, result, strict=False))
                if output is not None
            ]
        return None

    def _product(
        self,
        name: str,
        sizes: Sizes,
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
        found = []
        for tensor in tensors:
            count, sides = tensor.numel(), zip(tensor.shape, tensor.stride(), strict=True)
            if 0 in tensor.stride():  # what is expanded is there once
                count = math.prod(size for size, stride in sides if stride != 0 or size == 0)
            found.append((self._number(tensor), count * tensor.element_size()))
        return tuple(found)


def _is_strided(family: Family, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether a kernel looks for the place of each number; where all tensors lie alike it takes eight at once."""
    if family not in ("pointwise", "curve", "curve_backward", "convert", "strided"):
        return family == "reduction"
    laid = (zip(each.shape, each.stride(), strict=True) for each in (*outputs, *inputs))
    return len({tuple((size, stride) for size, stride in sides if size > 1) for sides in laid}) > 1


def _in_kernels(operation: Operation) -> list[Operation]:
    """Returns what runs for an operator that torch makes of several kernels."""
    if operation.name in ("select_backward", "slice_backward"):  # zeros, and a part of them is written again
        ((tensor, _),) = operation.writes
        part = replace(operation, name="copy_", family="strided", writes=((tensor, operation.reads[0][1]),))
        return [replace(operation, name="zeros", layout="", reads=()), part]
    if operation.name == "_safe_softmax":  # which rows have nothing but -inf is looked for, and put right
        ((tensor, size),) = operation.writes
        whether = ((tensor, size // 4),)  # a byte a number
        return [
            replace(operation, name="_softmax", family="softmax"),
            replace(operation, name="eq", writes=whether),
            replace(operation, name="all", family="reduction", reads=whether, writes=()),
            replace(operation, name="where", layout="strided", reads=operation.writes),
        ]
    return [operation]


def _layout(left: torch.Tensor, right: torch.Tensor) -> str:
    def is_turned(matrix: torch.Tensor) -> bool:
        return matrix.stride(-1) != 1 and matrix.stride(-2) == 1

    return ("t" if is_turned(left) else "n") + ("t" if is_turned(right) else "n")


def _order(image: torch.Tensor) -> str:
    """Returns how an image lies where its channels are outermost, which tensor units do not take."""
    return "channels first" if image.ndim > 3 and image.shape[1] > 1 and image.stride(1) != 1 else ""


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


_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN = frozenset((int, float, bool, str, complex, type(None)))
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_RESHAPES = ("resize", "set_", "as_strided", "t_", "transpose_", "squeeze", "unsqueeze")
Kernels: TypeAlias = tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


@dataclass(slots=True)
class KnownCall:
    """What an operator does with such arguments: it returns a new tensor, or several, or (None) its first argument."""

    returns: _Made | tuple[_Made | None, ...] | None
    kernels: Kernels | None = None  # nobody has asked for them yet


class OperatorCall(NamedTuple):
    """An operator was called: what it returned, with the tensors in it; all tensors; and what is known of it."""

    result: Any
    returned: list[torch.Tensor]
    tensors: list[torch.Tensor]
    known: KnownCall | None


class KnownCalls:
    def __init__(self) -> None:
        self._known: dict[Hashable, KnownCall | None] = {}  # None: it must be called each time
        self._places: dict[int, int] = {}  # of the tensors of a call, by their identity
        self._operators = Operators(lambda tensor: self._places[id(tensor)])

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> OperatorCall:
        tensors: list[torch.Tensor] = []
        key = _key(func, args, kwargs, tensors) if _kind(func) else None
        if key is None:
            return whole_call(func(*args, **kwargs), args, kwargs)
        known = self._known.get(key)
        if known is None:
            call = whole_call(func(*args, **kwargs), args, kwargs)
            if key in self._known:
                return call
            is_in_place = _kind(func) == "in place" and call.result is args[0]
            known = KnownCall(None) if is_in_place else _describe(call) if _kind(func) == "new" else None
            self._known[key] = known
            return call._replace(known=known)
        if isinstance(known.returns, _Made):
            made = known.returns.make()
            tensors.append(made)
            return OperatorCall(made, [made], tensors, known)
        if known.returns is None:
            return OperatorCall(args[0], [args[0]], tensors, known)
        results = tuple([None if each is None else each.make() for each in known.returns])
        returned = [each for each in results if each is not None]
        return OperatorCall(results, returned, tensors + returned, known)

    def kernels(self, func: Any, args: Any, kwargs: dict[str, Any], call: OperatorCall) -> Kernels:
        """Returns what a device runs for a call; tensors are known by their places among the call's."""
        known = call.known
        if known is not None and known.kernels is not None:
            return known.kernels
        self._places = {}
        for place, tensor in enumerate(call.tensors):
            self._places.setdefault(id(tensor), place)
        found = tuple(self._operators.kernels(func, args, kwargs, call.result))
        if known is not None:
            known.kernels = found
        return found

    def attention(self, tensors: list[torch.Tensor], *, is_causal: bool, is_back: bool) -> Operation:
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        return self._operators.attention(tensors, is_causal=is_causal, is_back=is_back)


def whole_call(result: Any, args: Any, kwargs: dict[str, Any]) -> OperatorCall:
    """Returns what is known of a call by its result; None is that of one that writes to its arguments."""
    returned = list(tensors_of(result))
    return OperatorCall(result, returned, [*tensors_of((args, kwargs)), *returned], None)


@functools.cache
def _kind(func: Any) -> str:
    """Says whether an operator makes new tensors, or writes to its first argument; neither: nothing is remembered."""
    schema = func._schema
    if all(each.alias_info is None for each in (*schema.arguments, *schema.returns)):
        return "new" if schema.returns and func.namespace == "aten" else ""
    first, *others = schema.arguments
    writes_first = first.alias_info is not None and first.alias_info.is_write
    is_plain = len(schema.returns) == 1 and all(each.alias_info is None for each in others)
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    is_reshape = func._overloadpacket.__name__.startswith(_RESHAPES)
    if writes_first and is_plain and returned is not None and returned.is_write and not is_reshape:
        return "in place"
    return ""


def _key(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Hashable | None:
    """Returns what decides about a call, and puts its tensors into a list; None where that is not known."""
    found: list[Any] = [id(func)]
    if not _sign(args, found, tensors):
        return None
    if kwargs:
        found += kwargs
        if not _sign(kwargs.values(), found, tensors):
            return None
    if len(tensors) > 1:
        ids = [id(tensor) for tensor in tensors]
        if len(set(ids)) < len(ids):
            found += map(ids.index, ids)
    return tuple(found)


def _sign(values: Iterable[Any], found: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Adds what decides about a result; False where there are values, or something strange."""
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            if not value.is_meta:
                return False
            tensors.append(value)
            found += (value.shape, value.stride(), value.dtype)
        elif kind in _PLAIN:
            found += (kind, value)
        elif kind is list or kind is tuple:
            inner: list[Any] = []
            if not _sign(value, inner, tensors):
                return False
            found.append(tuple(inner))
        else:
            return False
    return True


def _describe(call: OperatorCall) -> KnownCall | None:
    """Returns what to make of a result again; None where it is something else than dense tensors of their own."""
    result = call.result
    is_single = isinstance(result, torch.Tensor)
    if not call.returned or not (is_single or isinstance(result, tuple)):
        return None
    taken = call.tensors[: len(call.tensors) - len(call.returned)]
    there = {tensor.untyped_storage()._cdata for tensor in taken}
    found: list[_Made | None] = []
    for each in (result,) if is_single else result:
        if each is not None and not _is_own(each, there):
            return None
        found.append(None if each is None else _Made(each.shape, each.stride(), each.dtype))
    return KnownCall(found[0] if is_single else tuple(found))


def _is_own(result: Any, there: set[int]) -> bool:
    """Whether a result is a meta tensor that fills a storage which was not there before."""
    if type(result) is not torch.Tensor or not result.is_meta or result.storage_offset() != 0:
        return False
    storage, sides = result.untyped_storage(), zip(result.shape, result.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sides) if result.numel() else 0
    return storage._cdata not in there and storage.nbytes() == span * result.element_size()
