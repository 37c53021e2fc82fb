"""What a host does while ranks train on it: processors, memory, network, disks, and GPUs.

A look costs a millisecond or so. Rates are those since the look before, so that the first one has none.

name                            unit           what
system.cpu.utilization          share of 1     of all cores
system.memory.usage, .limit     bytes          of the host
process.memory.usage/RANK       bytes          resident memory of a rank's process
system.network.io/DIRECTION     bytes/s        receive, transmit: all interfaces but loopback
system.disk.io/DIRECTION        bytes/s        read, write: all disks
hw.gpu.*, hw.power, hw.temperature             of each GPU: see ``records/gpus.py``
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping

import psutil

from paceline.records.gpus import Gpus
from paceline.records.records import HostRecord

_LOOPBACK = ("lo", "lo0")


class HostSampler:
    """Reads what this host does; ``processes`` returns the process of each rank on it, by rank."""

    def __init__(self, processes: Callable[[], Mapping[int, int]], gpus: Gpus | None = None) -> None:
        self._processes = processes
        self._gpus = gpus
        self._host = socket.gethostname()
        self._counted, self._counted_s = _counters(), time.monotonic()
        self._cpu_s = _cpu_seconds()

    def look(self) -> HostRecord:
        """Reads everything once."""
        memory = psutil.virtual_memory()
        values = {
            "system.memory.usage": float(memory.total - memory.available),
            "system.memory.limit": float(memory.total),
            **self._rates(),
        }
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
    """Returns the seconds that all cores were busy, and all their seconds."""
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
