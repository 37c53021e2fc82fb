"""Offload: what lives in host memory instead of the device's. The sharded engines carry it out.

    optimizer     fp32 shards and optimizer state live on the host, and the update runs there
    gradients     reduced gradients are accumulated on the host (implied by ``optimizer``)
    parameters    the device keeps no shard: a unit is copied from the host before it is gathered
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


def host_empty(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Makes a host tensor that ``device`` can copy from and to without waiting: pinned where that is CUDA."""
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")
