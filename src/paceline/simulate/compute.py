"""What a rank's compute takes on another device: every operation of torch is run here, and priced for there.

    seconds of an operation  =  max(floating point operations / rate, bytes read and written / bandwidth)
    on a host                   + what it takes to call it
    on a GPU                    at least what it takes to launch it: launches run ahead of the device

Operations are counted as torch's flop counter does (products, convolutions, attention); all others are bound by memory.
Views cost nothing. The same run costs the same on every machine, to the bit: nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from paceline.cluster.devices import Device

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NO_WORK = ("empty", "new_empty", "resize_", "set_", "_local_scalar_dense", "lift_fresh", "_unsafe_view", "detach")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second. The default is one core of a host, in round numbers."""

    name: str = "one core"
    flops: float = 50e9
    half_flops: float = 50e9
    bandwidth: float = 10e9
    launch_s: float = 5e-6
    runs_ahead: bool = False

    @classmethod
    def of(cls, device: Device) -> Rates:
        """Reads them from a device of the catalog: the most that products reach there, and what streams reach."""
        return cls(
            name=device.name,
            flops=device.ceiling("fp32"),
            half_flops=device.ceiling("bf16"),
            bandwidth=device.memory_bandwidth * device.memory_share,
            launch_s=device.launch_s,
            runs_ahead=not device.is_cpu,
        )

    def seconds(self, flops: float, num_bytes: float, dtype: torch.dtype) -> float:
        """Returns how long one operation takes."""
        rate = self.half_flops if dtype in _DTYPES else self.flops / (2 if dtype == torch.float64 else 1)
        work = max(flops / rate, num_bytes / self.bandwidth)
        return max(work, self.launch_s) if self.runs_ahead else work + self.launch_s


class PricedCompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Spends the price of every operation that is run inside; a context of one thread."""

    def __init__(self, rates: Rates, spend: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self._spend = spend
        self._is_free: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation as it is, and spends what it costs."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in self._is_free:
            self._is_free[func] = _is_free(func)
        if not self._is_free[func]:
            tensors = list(_tensors((args, kwargs, result)))
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            dtype = tensors[0].dtype if tensors else torch.float32
            self._spend(self._rates.seconds(_flops(func, args, kwargs, result), num_bytes, dtype))
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def _is_free(func: Any) -> bool:
    """Says whether an operation touches no element: a view, or memory that nobody has written yet."""
    name = func.__name__.partition(".")[0]
    returns = func._schema.returns
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return is_view or name.startswith(_NO_WORK)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = func._overloadpacket
    counter = flop_registry.get(packet)
    if counter is not None:
        return float(counter(*args, **kwargs, out_val=result))
    if "scaled_dot_product" in func.__name__:  # the variants of the CPU, which the registry has not
        shapes = [tensor.shape for tensor in _tensors(args) if tensor.ndim == 4]
        if "backward" in func.__name__:
            return 2.5 * _attention_flops(*shapes[1:4])
        return _attention_flops(*shapes[:3])
    return 0.0


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> float:
    """Two products, of the queries with the keys and of the weights with the values."""
    heads = math.prod(query[:-2])
    return 2.0 * heads * query[-2] * key[-2] * (query[-1] + value[-1])
