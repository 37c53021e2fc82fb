"""The update of the parameters: clipped by the global gradient norm, and left out where that is not finite.

Every rank decides by the global gradient norm, which is the same number on all of them and not finite as soon as any
gradient of any rank is not. So all ranks update, or none does.

[Note: skipping] On a CPU the norm is there, and the host decides. On CUDA the host would have to wait for the device in
every step; instead the fused optimizers are handed a flag on the device and leave parameters and state as they are if
it is set. Where that cannot be (an optimizer that is not fused, parameters offloaded to the host) the host waits.

[Note: clipping] Gradients that are read and written again only to be scaled cost as much as a fifth of the update. So a
CPU scales them in the steps that need it, and fused optimizers on CUDA are handed the factor: they read them anyway.
The optimizer of masters (master_adamw.py) is handed the norm itself.
"""

from __future__ import annotations

import math

import torch

from paceline.train.master_adamw import MasterAdamW, Scaling

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def update_if_finite(
    optimizer: torch.optim.Optimizer,
    norm: torch.Tensor,
    max_norm: float | None = None,
    weight: torch.Tensor | None = None,
) -> bool | None:
    """Makes one optimizer step unless the gradient norm is not finite; then parameters and state stay as they are.

    With ``max_norm`` the gradients are scaled first, so that their norm is at most that. Says whether there was an
    update; None where only the device knows. ``weight`` is a factor that the gradients still lack, and the norm has: of
    a MasterAdamW alone.
    """
    if isinstance(optimizer, MasterAdamW):
        optimizer.step_scaled(Scaling(norm=norm, max_norm=max_norm, weight=weight))
        return None
    if norm.device.type != "cpu" and _takes_flag(optimizer, norm.device):
        extras = {"found_inf": torch.isfinite(norm).logical_not_().to(torch.float32)}
        if max_norm is not None and _takes_scale(optimizer):
            extras["grad_scale"] = ((norm + _EPS) / max_norm).clamp_(min=1.0).to(torch.float32)  # a divisor
        elif max_norm is not None:
            _scale(optimizer, (max_norm / (norm + _EPS)).clamp_(max=1.0))
        _step_with(optimizer, extras)
        return None
    if not math.isfinite(norm.item()):  # sync point, except on a CPU
        return False
    if max_norm is not None and max_norm < norm.item() + _EPS:
        _scale(optimizer, max_norm / (norm + _EPS))
    optimizer.step()
    return True


def _step_with(optimizer: torch.optim.Optimizer, extras: dict[str, torch.Tensor]) -> None:
    """Steps with tensors that the fused kernels read from the optimizer's attributes."""
    vars(optimizer).update(extras)
    try:
        optimizer.step()
    finally:
        for name in extras:
            delattr(optimizer, name)


@torch.no_grad()
def _scale(optimizer: torch.optim.Optimizer, coefficient: torch.Tensor) -> None:
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in found:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), gradients in kinds.items():
        torch._foreach_mul_(gradients, coefficient.to(device, dtype))


def _takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Says whether the kernels' factor, which is a float32, is exact enough for what is updated."""
    return all(p.dtype != torch.float64 for group in optimizer.param_groups for p in group["params"])


def _takes_flag(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Says whether the optimizer's kernels can leave a step out by themselves.

    SGD makes its momentum in the first step, and would keep uninitialised memory of one that is left out.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups = optimizer.param_groups
    has_state = bool(optimizer.state) or not any(group.get("momentum") for group in groups)
    return has_state and all(p.device == device for group in groups for p in group["params"][:1])
