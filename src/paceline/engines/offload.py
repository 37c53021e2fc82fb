"""Offload: whether the host can hold it, and the host's memory for it. ``plan/layout.py`` says what there is."""

from __future__ import annotations

import psutil
import torch

from paceline.errors import UsageError
from paceline.plan.layout import Offload
from paceline.units import GIB


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
