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
    if not offload.is_any or device.type in ("cpu", "meta"):  # what has no values takes no memory
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


def host_empty(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Makes a host tensor that ``device`` can copy from and to without waiting: pinned where that is CUDA.

    A dry run has no values on the host either; that the memory would be pinned tells it from a device's.
    """
    if device.type == "meta":
        return torch.empty(length, dtype=dtype, device=device, pin_memory=True)
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")
