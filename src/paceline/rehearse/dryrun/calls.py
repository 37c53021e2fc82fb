"""Operators on tensors of given shapes, looked at once: blocks that are alike call the same ones again and again.

    key        the operator; shape, strides and dtype of each tensor; every plain value; which tensors are the same one
    result     what an operator returns that makes new tensors, or its first argument where it writes to that
    kernels    what a device runs for it, with the tensors by their places: arguments first, then results

torch works out the shape of a result in Python for most operators, which takes ten times as long as all else that a dry
run does. What follows from values, returns a view, or lies on another device is not remembered. A recording with what
is known and one without are the same, byte by byte.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from paceline.cluster.kernels import Operation
from paceline.comm.dry.communicator import META
from paceline.rehearse.dryrun.operators import Operators, tensors_of

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN = frozenset((int, float, bool, str, complex, type(None), torch.dtype, torch.device)) | {
    torch.layout,
    torch.memory_format,
}
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
            return _whole(func(*args, **kwargs), args, kwargs)
        known = self._known.get(key)
        if known is None:
            return self._learn(key, func, args, kwargs)
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
        """Returns fused attention on query, key, value and all else; the last tensor is written."""
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        return self._operators.attention(tensors, is_causal=is_causal, is_back=is_back)

    def _learn(self, key: Hashable, func: Any, args: Any, kwargs: dict[str, Any]) -> OperatorCall:
        """Calls an operator, and looks at what it returns if that was not done before."""
        call = _whole(func(*args, **kwargs), args, kwargs)
        if key in self._known:
            return call
        known = None
        if _kind(func) == "new":
            known = _describe(call)
        elif call.result is args[0]:
            known = KnownCall(None)
        self._known[key] = known
        return call._replace(known=known)


def updates(args: Any, kwargs: dict[str, Any]) -> OperatorCall:
    """Returns a call that writes to its arguments and returns nothing; there is nothing to be done."""
    return OperatorCall(None, [], list(tensors_of((args, kwargs))), None)


def _whole(result: Any, args: Any, kwargs: dict[str, Any]) -> OperatorCall:
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
    storage = result.untyped_storage()
    return storage._cdata not in there and storage.nbytes() == _span(result) * result.element_size()


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
