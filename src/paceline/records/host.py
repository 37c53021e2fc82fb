"""What a host does while ranks train on it: processors, memory, network, disks, and GPUs.

A look costs a millisecond or so. Rates are those since the look before, so that the first one has none.

name                            unit           what
system.cpu.utilization          share of 1     of all cores
system.memory.usage, .limit     bytes          of the host
process.memory.usage/RANK       bytes          resident memory of a rank's process
system.network.io/DIRECTION     bytes/s        receive, transmit: all interfaces but loopback
system.disk.io/DIRECTION        bytes/s        read, write: all disks
hw.gpu.*, hw.power, hw.temperature             of each GPU (NVML): how busy, full, warm and fast it is, and why slow
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from paceline.records.records import HostRecord

_LOOPBACK = ("lo", "lo0")
_THROTTLED = {  # the bits of NVML's reasons for lower clocks, by what is the matter
    "power": 0x04 | 0x80,  # the power limit, the power brake of the host
    "thermal": 0x20 | 0x40,
    "hardware": 0x08,
    "sync": 0x10,  # another GPU of its group is slow
}


class Gpus:
    """The GPUs of this host. ``library`` is ``pynvml``. Raises its NVMLError where there is no driver."""

    def __init__(self, library: Any) -> None:
        self.library = library
        library.nvmlInit()
        self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]

    def read(self) -> dict[str, float]:
        """Reads all values, named as ``HostRecord`` says: ``hw.gpu.utilization/0``."""
        return {f"{name}/{index}": x for index, handle in enumerate(self._handles) for name, x in self._values(handle)}

    def close(self) -> None:
        with contextlib.suppress(self.library.NVMLError):
            self.library.nvmlShutdown()

    def _values(self, handle: Any) -> Iterator[tuple[str, float]]:
        library, ask = self.library, self._ask
        if (used := ask(library.nvmlDeviceGetUtilizationRates, handle)) is not None:
            yield "hw.gpu.utilization", used.gpu / 100
        if (memory := ask(library.nvmlDeviceGetMemoryInfo, handle)) is not None:
            yield "hw.gpu.memory.usage", float(memory.used)
            yield "hw.gpu.memory.limit", float(memory.total)
        if (power := ask(library.nvmlDeviceGetPowerUsage, handle)) is not None:
            yield "hw.power", power / 1e3
        if (warmth := ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU)) is not None:
            yield "hw.temperature", float(warmth)
        for name, clock in (("sm", library.NVML_CLOCK_SM), ("memory", library.NVML_CLOCK_MEM)):
            if (megahertz := ask(library.nvmlDeviceGetClockInfo, handle, clock)) is not None:
                yield f"hw.gpu.clock.{name}", megahertz * 1e6
        reasons = ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        yield from ((f"hw.gpu.throttle.{name}", 1.0) for name, bits in _THROTTLED.items() if reasons & bits)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self.library.NVMLError:
            return None


def open_gpus() -> tuple[Gpus | None, str]:
    """Returns the GPUs of this host, or None and the reason why nothing can be read of them."""
    try:
        import pynvml

        return Gpus(pynvml), ""
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    except pynvml.NVMLError as error:
        return None, f"NVML does not answer ({error})"


class HostSampler:
    """Reads what this host does; ``processes`` returns the process of each rank on it, by rank."""

    def __init__(self, processes: Callable[[], Mapping[int, int]], gpus: Gpus | None = None) -> None:
        self._processes, self._gpus = processes, gpus
        self._host = socket.gethostname()
        self._counted, self._counted_s = _counters(), time.monotonic()
        self._cpu_s = _cpu_seconds()

    def look(self) -> HostRecord:
        memory = psutil.virtual_memory()
        values = {"system.memory.usage": float(memory.total - memory.available)}
        values |= {"system.memory.limit": float(memory.total), **self._rates()}
        (busy_s, all_s), (busy_before_s, all_before_s) = _cpu_seconds(), self._cpu_s
        self._cpu_s = busy_s, all_s
        if all_s > all_before_s:
            values["system.cpu.utilization"] = round((busy_s - busy_before_s) / (all_s - all_before_s), 4)
        for rank, pid in self._processes().items():
            with contextlib.suppress(psutil.Error):
                values[f"process.memory.usage/{rank}"] = float(psutil.Process(pid).memory_info().rss)
        if self._gpus is not None:
            values |= self._gpus.read()
        return HostRecord(host=self._host, values=values, time=time.time())

    def _rates(self) -> dict[str, float]:
        before, before_s = self._counted, self._counted_s
        self._counted, self._counted_s = _counters(), time.monotonic()
        passed_s = self._counted_s - before_s
        if passed_s <= 0:
            return {}
        return {
            name: round((number - before[name]) / passed_s, 1)
            for name, number in self._counted.items()
            if name in before and number >= before[name]  # an interface may go, and come back with a counter of 0
        }


def _cpu_seconds() -> tuple[float, float]:
    times = psutil.cpu_times()
    # Those of guests are in the user's too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _counters() -> dict[str, int]:
    """Returns the bytes that the network and the disks have moved; what a container hides is left out."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, RuntimeError):
        cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name not in _LOOPBACK]
        found["system.network.io/receive"] = sum(card.bytes_recv for card in cards)
        found["system.network.io/transmit"] = sum(card.bytes_sent for card in cards)
    with contextlib.suppress(OSError, RuntimeError):
        disks = psutil.disk_io_counters()
        if disks is not None:
            found["system.disk.io/read"], found["system.disk.io/write"] = disks.read_bytes, disks.write_bytes
    return found
