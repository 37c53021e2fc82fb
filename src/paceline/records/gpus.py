"""What NVML says of the GPUs of this host: how busy, how full, how warm, how fast, and what slows them down.

NVML is asked through ``pynvml``, a few microseconds to a millisecond a value, in a process that trains nothing. What a
GPU does not tell is left out of its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_THROTTLED = {  # the bits of NVML's reasons for lower clocks, by what is the matter
    "power": 0x04 | 0x80,  # the power limit, the power brake of the host
    "thermal": 0x20 | 0x40,
    "hardware": 0x08,
    "sync": 0x10,  # another GPU of its group is slow
}


class Gpus:
    """The GPUs of this host. ``library`` is ``pynvml``. Raises its NVMLError where there is no driver."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.nvmlInit()
        self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> dict[str, float]:
        """Reads all values, named as ``HostRecord`` says: ``hw.gpu.utilization/0``."""
        return {f"{name}/{index}": x for index, handle in enumerate(self._handles) for name, x in self._values(handle)}

    def close(self) -> None:
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()

    def _values(self, handle: Any) -> Iterator[tuple[str, float]]:
        library = self._library
        used = self._ask(library.nvmlDeviceGetUtilizationRates, handle)
        if used is not None:
            yield "hw.gpu.utilization", used.gpu / 100
        memory = self._ask(library.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            yield "hw.gpu.memory.usage", float(memory.used)
            yield "hw.gpu.memory.limit", float(memory.total)
        power = self._ask(library.nvmlDeviceGetPowerUsage, handle)
        if power is not None:
            yield "hw.power", power / 1e3
        temperature = self._ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            yield "hw.temperature", float(temperature)
        for name, clock in (("sm", library.NVML_CLOCK_SM), ("memory", library.NVML_CLOCK_MEM)):
            megahertz = self._ask(library.nvmlDeviceGetClockInfo, handle, clock)
            if megahertz is not None:
                yield f"hw.gpu.clock.{name}", megahertz * 1e6
        reasons = self._ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        if reasons is not None:
            for name, bits in _THROTTLED.items():
                if reasons & bits:
                    yield f"hw.gpu.throttle.{name}", 1.0

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the answer; None where this GPU or driver has none."""
        try:
            return question(*arguments)
        except self._library.NVMLError:
            return None


def open_gpus() -> tuple[Gpus | None, str]:
    """Returns the GPUs of this host, or None and the reason why nothing can be read of them."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        return Gpus(pynvml), ""
    except pynvml.NVMLError as error:
        return None, f"NVML does not answer ({error})"
