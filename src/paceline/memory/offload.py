"""Offload: what lives in host memory instead of the device's. The sharded engines carry it out.

    optimizer     fp32 shards and optimizer state live on the host, and the update runs there
    gradients     reduced gradients are accumulated on the host (implied by ``optimizer``)
    parameters    the device keeps no shard: a unit is copied from the host before it is gathered
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from paceline.errors import UsageError
from paceline.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Which parts are offloaded."""

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False

    @property
    def is_any(self) -> bool:
        """Whether anything is offloaded."""
        return self.optimizer or self.gradients or self.parameters


def check_offload(offload: Offload, device: torch.device, num_parameters: int) -> None:
    """Raises UsageError where the host cannot hold what ``num_parameters`` of a rank need there."""
    if not offload.is_any or device.type == "cpu":
        return
    # Masters, gradients and two moments in fp32, and staged parameters.
    needed = num_parameters * (18 if offload.optimizer else 8)
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"offload needs {needed / GIB:.1f} GiB of host memory for each rank; {available / GIB:.1f} GiB are free\n"
            "  masters, gradients and two moments take 18 bytes for each parameter of a rank\n"
            "  use more ranks, offload less, or a smaller model"
        )


class Lane:
    """Copies between host and device beside what the device computes; on a CPU there is nothing beside.

    A copy begins when the device has come so far as it was issued; ``wait`` makes later work on the device wait for it,
    and ``finish`` the host.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy. The host's side is pinned; the device's is kept until the copy has ended."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Makes what the device computes from here on wait for the copies: a lane is a ``Work``."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Makes the host wait for the copies. A sync point."""
        if self._stream is not None:
            self._stream.synchronize()


def host_empty(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Makes a host tensor that ``device`` can copy from and to without waiting: pinned where that is CUDA."""
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")
