"""What operators return for tensors of given shapes, found once: a model calls the same ones again and again.

torch works out the shape of a result in Python for most operators, which takes ten times as long as all else that a dry
run does. An operator that neither writes to its arguments nor returns a view of one is a function of shapes, strides,
dtypes and plain values; one that writes to its first argument returns that.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

_SIMPLE = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_PLAIN = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True, slots=True)
class _Made:
    """A result without its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class KnownShapes:
    """Calls operators on meta tensors, and remembers what they returned."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._kinds: dict[Any, str] = {}

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what ``func`` does."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        key = _key((func, args, kwargs)) if kind else None
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is None:
            result = func(*args, **kwargs)
            self._known[key] = args[0] is result or _describe(result) if kind == "in place" else _describe(result)
            return result
        if kind == "in place":
            return args[0] if known is True else func(*args, **kwargs)
        if known is False:
            return func(*args, **kwargs)
        return tuple(_make(each) for each in known) if isinstance(known, tuple) else _make(known)


def _kind(func: Any) -> str:
    """Says whether an operator makes new tensors, or writes to its first argument; neither: nothing is remembered."""
    schema = func._schema
    if all(each.alias_info is None for each in (*schema.arguments, *schema.returns)):
        return "new" if schema.returns and func.namespace == "aten" else ""
    first, *others = schema.arguments
    writes_first = first.alias_info is not None and first.alias_info.is_write
    is_plain = len(schema.returns) == 1 and all(each.alias_info is None for each in others)
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    name = func._overloadpacket.__name__
    is_resize = name.startswith(("resize", "set_", "as_strided", "t_", "transpose_", "squeeze", "unsqueeze"))
    if writes_first and is_plain and returned is not None and returned.is_write and not is_resize:
        return "in place"
    return ""


def _key(value: Any) -> Hashable | None:
    """Returns what decides about a result; None where that cannot be told, or where there are values."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if kind in _SIMPLE:
        return kind, value
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        found = []
        for each in value:
            key = _key(each)
            if key is None:
                return None
            found.append(key)
        return tuple(found)
    return value if callable(value) else None


def _describe(result: Any) -> Any:
    """Returns what to make of a result again; False where it is something else than dense meta tensors."""
    if isinstance(result, torch.Tensor):
        is_whole = result.is_meta and result.storage_offset() == 0 and type(result) is torch.Tensor
        whole = result.untyped_storage().nbytes() == _span(result) * result.element_size()
        return _Made(result.shape, result.stride(), result.dtype) if is_whole and whole else False
    if isinstance(result, tuple) and result:
        found = tuple(None if each is None else _describe(each) for each in result)
        return False if any(each is False for each in found) else found
    return False


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _make(known: Any) -> Any:
    return None if known is None else known.make()
