"""The update of the parameters, left out where a gradient is not finite.

Every rank decides by the global gradient norm, which is the same number on all of them and not finite as soon as any
gradient of any rank is not. So all ranks update, or none does.

[Note: skipping] On a CPU the norm is there, and the host decides. On CUDA the host would have to wait for the device in
every step; instead the fused optimizers are handed a flag on the device and leave parameters and state as they are if
it is set. Where that cannot be (an optimizer that is not fused, parameters offloaded to the host) the host waits.
"""

from __future__ import annotations

import math

import torch


def update_if_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> bool | None:
    """Makes one optimizer step unless the gradient norm is not finite; then parameters and state stay as they are.

    Says whether there was an update; None where only the device knows.
    """
    if norm.device.type != "cpu" and _takes_flag(optimizer, norm.device):
        flag = torch.isfinite(norm).logical_not_().to(torch.float32)
        optimizer.found_inf = flag  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
        return None
    is_finite = math.isfinite(norm.item())  # sync point, except on a CPU
    if is_finite:
        optimizer.step()
    return is_finite


def _takes_flag(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Says whether the optimizer's kernels can leave a step out by themselves.

    SGD makes its momentum in the first step, and would keep uninitialised memory of one that is left out.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups = optimizer.param_groups
    has_state = bool(optimizer.state) or not any(group.get("momentum") for group in groups)
    return has_state and all(p.device == device for group in groups for p in group["params"][:1])
