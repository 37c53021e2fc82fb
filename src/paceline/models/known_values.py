"""Values of tensors that have none, where these follow from shapes alone: positions, masks, counts of tokens.

A model on the meta device may ask whether its positions are 0, 1, 2, ... or whether a mask hides anything. Tensors
that ``arange``, ``ones`` and the like made, and whole numbers and truth values that are computed from these alone, have
an answer. It is worked out when somebody asks, and not before:

    torch.arange(4) --> diff --> != 1 --> any --> .item()        each remembers how it was made, and no tensor is kept
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_MAKERS = frozenset(("arange", "ones", "zeros", "full", "scalar_tensor", "eye", "tril_indices", "triu_indices"))
_FILLED = {"ones_like": 1, "new_ones": 1, "zeros_like": 0, "new_zeros": 0}  # whatever the values of their argument are
_MOST = 2**24  # elements of a tensor that is worked out


@dataclass(slots=True)
class _Made:
    """How a tensor was made. ``version`` is torch's count of writes to it, when that was noted."""

    make: Callable[[], Any]
    version: int
    value: Any = None

    def result(self) -> Any:
        self.value = self.make() if self.value is None else self.value
        return self.value


class KnownValues:
    def __init__(self) -> None:
        self._made: MutableMapping[torch.Tensor, _Made] = WeakTensorKeyDictionary()

    def tell(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        self._made[tensor] = _Made(make, tensor._version)

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Remembers how an operator made its result, if that can be told from shapes alone."""
        if type(result) is not torch.Tensor or not result.is_meta:
            return
        name = func._overloadpacket.__name__
        if result.is_floating_point() and name not in _MAKERS and name not in _FILLED:
            return  # what layers compute: nobody knows it, and there is much of it
        if name in _FILLED:
            filled, shape, dtype = _FILLED[name], result.shape, result.dtype
            self.tell(result, lambda: torch.full(shape, filled, dtype=dtype))
            return
        if "empty" in name or torch.Tag.nondeterministic_seeded in func.tags:
            return
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        sources = [self._source(each) for each in tensors]
        if None in sources or not (sources or name in _MAKERS) or result.numel() > _MOST:
            return
        if any(each is result for each in tensors):  # written in place: its views have changed, too
            return
        places = {id(tensor): source for tensor, source in zip(tensors, sources, strict=True)}
        given = tree_map(lambda value: places.get(id(value), value), (args, kwargs))

        def plain(value: Any) -> Any:
            if isinstance(value, _Made):
                return value.result()
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def work_out() -> Any:
            args, kwargs = tree_map(plain, given)
            return func(*args, **kwargs)

        self.tell(result, work_out)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of a tensor, on the CPU; None where they are not known."""
        source = self._source(tensor)
        if source is None:
            return None
        with _disable_current_modes():
            found: torch.Tensor = source.result()
        return found

    def _source(self, tensor: torch.Tensor) -> _Made | None:
        """Returns how a tensor was made; None where nobody knows, or somebody has written to it since."""
        if not tensor.is_meta:  # an index, say, which has values
            with _disable_current_modes():
                return _Made(tensor.clone, tensor._version, tensor.detach().clone())
        found = self._made.get(tensor)
        return found if found is not None and found.version == tensor._version else None


def indexed(args: Any) -> Any:
    """Returns the arguments of ``tensor[...]`` with lists as tensors on the CPU: torch would drop their values."""
    tensor, index = args
    if not tensor.is_meta:
        return args
    parts = index if isinstance(index, tuple) else (index,)
    kept = tuple(torch.tensor(each, device="cpu") if isinstance(each, list) else each for each in parts)
    return tensor, kept if isinstance(index, tuple) else kept[0]


class _KeepsIndices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*(indexed(args) if func is torch.Tensor.__getitem__ else args), **(kwargs or {}))


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, values: KnownValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled: torch need not ask its compiler at each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        known = self._values.value(args[0]) if func is torch.ops.aten._local_scalar_dense.default else None
        if known is not None:
            return known.item()
        result = func(*args, **(kwargs or {}))
        self._values.note(func, args, kwargs or {}, result)
        return result


@contextlib.contextmanager
def answering(values: KnownValues) -> Iterator[None]:
    """Answers a model on the meta device that reads a number which is known; torch refuses all others."""
    with _KeepsIndices(), _Answers(values):
        yield
