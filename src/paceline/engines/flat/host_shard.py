"""The optimizer's shard on the host, and the way of its values to the device.

master (as built, on the host)  --cast-->  staged (the parameters' dtype, pinned)  --copy-->  the device
"""

from __future__ import annotations

import torch

from paceline.comm.base import Work
from paceline.engines.flat.side_stream import SideStream, host_empty


class HostShard:
    """A rank's slice of a flat group that an optimizer updates on the host."""

    def __init__(self, mine: torch.Tensor, param_dtype: torch.dtype, *, stays_on_device: bool) -> None:
        """Copies this rank's slice to the host. ``stays_on_device``: a copy in the parameters' dtype stays there."""
        self._device = mine.device
        self.master = host_empty(mine.numel(), mine.dtype, mine.device).copy_(mine)
        self.resident: torch.Tensor | None = None  # the slice on the device, another one after each update
        self.copies = SideStream(mine.device)
        self.seen_version = -1
        self._stays_on_device = stays_on_device
        is_cast = param_dtype != mine.dtype
        self._staged = host_empty(mine.numel(), param_dtype, mine.device) if is_cast else None

    def copy_to(self, mine: torch.Tensor, *, may_have_changed: bool) -> Work:
        """Copies the values to the device, beside what that computes.

        ``may_have_changed``: since the last call. The version alone does not tell: fused optimizers do not raise it.
        """
        source = self.master.detach() if self._staged is None else self._staged
        if may_have_changed or self.seen_version != self.master._version:
            self.seen_version = self.master._version
            if self._staged is not None:
                self._staged.copy_(self.master.detach())
            if self._stays_on_device:
                self.resident = torch.empty_like(source, device=self._device).copy_(source, non_blocking=True)
        self.copies.copy(mine, source if self.resident is None else self.resident)
        return self.copies
