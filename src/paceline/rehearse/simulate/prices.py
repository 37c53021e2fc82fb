"""What a rank's compute takes on another device: every operation of torch is run here, and priced for there.

    on a device of the catalog  the kernels that a dry run would count, priced as there (predict/replay/kernel_costs.py)
    on no device in particular  max(floating point operations / rate, bytes read and written / bandwidth)
    on a host                   + what it takes to call it
    on a GPU                    at least what it takes to launch it: launches run ahead of the device

Views cost nothing. The same run costs the same on every machine, to the bit: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cluster.devices import Device
from paceline.cluster.kernels import Operation
from paceline.models.measured import operator_flops
from paceline.predict.formulas.constants import constants_for, fitted_constants
from paceline.predict.replay.kernel_costs import KernelCosts
from paceline.predict.replay.program import Run
from paceline.rehearse.dryrun.operators import Operators, arguments_of, is_free, tensors_of

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second. The default is one core of a host, in round numbers."""

    name: str = "one core"
    flops: float = 50e9
    half_flops: float = 50e9
    bandwidth: float = 10e9
    launch_s: float = 5e-6
    runs_ahead: bool = False

    def price(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        tensors = list(tensors_of((args, kwargs, result)))
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = tensors[0].dtype if tensors else torch.float32
        return self.seconds(operator_flops(func, args, kwargs, result), num_bytes, dtype)

    def seconds(self, flops: float, num_bytes: float, dtype: torch.dtype) -> float:
        rate = self.half_flops if dtype in _HALVES else self.flops / (2 if dtype == torch.float64 else 1)
        work = max(flops / rate, num_bytes / self.bandwidth)
        return max(work, self.launch_s) if self.runs_ahead else work + self.launch_s


class KernelPrices:
    def __init__(self, device: Device) -> None:
        constants, _ = constants_for(fitted_constants(), device.generation, "eager")
        self.name = device.name
        self.work_s = self.launch_s = 0.0
        self._runs_ahead = not device.is_cpu
        self._costs = KernelCosts(device, constants, is_compiled=False)
        self._operators = Operators(lambda tensor: int(tensor.untyped_storage()._cdata))

    def price(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        total = 0.0
        for kernel in self._kernels(func, args, kwargs, result):
            work, launch = self._costs(Run(kernel))
            total += max(work, launch) if self._runs_ahead else work + launch
            if self._runs_ahead:
                self.work_s, self.launch_s = self.work_s + work, self.launch_s + launch
        return total

    def _kernels(self, func: Any, args: Any, kwargs: Any, result: Any) -> list[Operation]:
        name = func.__name__
        if "scaled_dot_product" not in name:
            return self._operators.kernels(func, args, kwargs, result)
        is_back = "backward" in name
        four = [tensor for tensor in tensors_of(args) if tensor.ndim == 4][1 if is_back else 0 :]
        written = [tensor for tensor in tensors_of(result) if tensor.ndim == 4]
        is_causal = bool(arguments_of(func, args, kwargs).get("is_causal"))
        return [self._operators.attention([*four, written[0]], is_causal=is_causal, is_back=is_back)]


class PricedCompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Spends the price of every operation that is run inside; a context of one thread."""

    def __init__(self, rates: Rates | KernelPrices, spend: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self._spend = spend

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_free(func):
            self._spend(self._rates.price(func, args, kwargs, result))
        return result
