"""The optimizer that a config asks for: AdamW, SGD, or any torch optimizer by its import path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.config import OptimConfig
from paceline.engines.flat.flat import full_shape
from paceline.errors import UsageError
from paceline.imports import import_from_path


def build_optimizer(config: OptimConfig, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Makes the optimizer over ``named`` parameters; those with one dim (biases, norms) get no weight decay.

    A parameter may be a flat slice of a sharded one: the whole one's dims count.
    """
    parameters = [parameter for _, parameter in named if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if len(full_shape(p)) >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if len(full_shape(p)) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "adamw":
        # Fused is one kernel for all parameters on CUDA, and one pass over each on CPU.
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=_can_fuse(parameters))
    if config.kind == "sgd":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=_can_fuse(parameters)
        )
    return _from_path(config, groups)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Sets every group to ``factor`` times its initial rate; returns the first group's rate."""
    groups = optimizer.param_groups
    for group in groups:
        if "initial_lr" not in group:
            group["initial_lr"] = group["lr"]
        group["lr"] = group["initial_lr"] * factor
    return float(groups[0]["lr"])


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


def _from_path(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    make = import_from_path(config.kind, "optim.kind")
    try:
        optimizer = make(groups, lr=config.lr, **config.args)
    except Exception as error:
        raise UsageError(
            f"optim.kind = {config.kind} failed with lr = {config.lr} and optim.args = {config.args}: {error}\n"
            "  it is called as Class(parameter_groups, lr=..., **args)"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optim.kind = {config.kind} made a {type(optimizer).__name__}, not a torch optimizer")
    return optimizer
