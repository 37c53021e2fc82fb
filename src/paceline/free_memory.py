"""How much memory there is, and how much is in use: of a GPU, or of the host that CPU ranks share."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from paceline.plan.plan import RunMachine

_UNLIMITED = 2**62


def free_host_bytes() -> int:
    """Returns how much of this host's memory can be had without swapping."""
    return psutil.virtual_memory().available


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory that this process has held: the allocator's on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_machine(device: str, ranks: int, node_ranks: int) -> RunMachine:
    """Returns ranks and their memory: of the smallest GPU, or shares of what is free on the host; allocates nothing."""
    available = free_host_bytes()
    memory = _UNLIMITED if device == "meta" else available // node_ranks  # meta holds nothing
    if device == "cuda":
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return RunMachine(device=device, device_bytes=memory, host_bytes=available, ranks=ranks, node_ranks=node_ranks)


class MemoryGauge:
    """Reads the most memory that this process has held since ``reset``.

    On CUDA that is what tensors took, on the CPU what was resident: a second equal pass may show nothing new.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._clear = device, Path("/proc/self/clear_refs")

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._clear.exists():
            self._clear.write_text("5")  # Linux: sets the peak to what is resident now

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._clear.exists():
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        return peak_memory_bytes(self._device)

    def now_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return psutil.Process().memory_info().rss

    def limit_bytes(self, node_ranks: int) -> int:
        """Returns how much this process may come to hold: now and free, of the GPU or of its share of the host."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return self.now_bytes() + free + cached
        return self.now_bytes() + free_host_bytes() // node_ranks
