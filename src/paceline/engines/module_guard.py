"""A module whose tensors an engine holds elsewhere: its own methods do the right thing, or name the engine's.

Under sharding a module has parts of its parameters, or values from before the last update; with masters it has rounded
ones. ``model.state_dict()``, ``save_pretrained()`` and ``model.load_state_dict()`` are calls that people keep from a
loop on one device, as they keep ``ddp.module.state_dict()`` from torch's DDP. They refuse. ``model.zero_grad()`` is
right: it forgets the gradients of what the engine updates in the place of the module's parameters.

Engines read the module's own tensors with ``state_dict(keep_vars=True)``, which stays open, and write them with
``load_own``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.shards import are_states_own, own_states


def guard_states(module: nn.Module) -> None:
    """Lets ``state_dict`` and ``load_state_dict`` of a module, and of all modules inside, refuse."""
    each: Any  # torch does not annotate these
    for each in module.modules():
        each.register_state_dict_pre_hook(_refuse_state)
        each.register_load_state_dict_pre_hook(_refuse_loading)


def load_own(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Loads a state into the module's own tensors, also where the module is guarded."""
    with own_states():
        module.load_state_dict(state)


def forget_gradients(parameters: Iterable[torch.Tensor], set_to_none: bool = True) -> None:
    """Does what ``zero_grad`` does, to any tensors. Gradients may be views of a bucket."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            if parameter.grad.grad_fn is not None:  # of create_graph; views cannot be detached in place
                parameter.grad = parameter.grad.detach()
            parameter.grad.requires_grad_(False).zero_()


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    del prefix
    if not keep_vars:
        raise UsageError(
            f"state_dict() of a {type(module).__name__} whose parameters an engine updates elsewhere\n"
            "  the module has parts of them, or values from before the last update\n"
            "  call engine.state_dict() on all ranks, or paceline.save(folder, engine, optimizer, step=step)"
        )


def _refuse_loading(module: nn.Module, *_: Any) -> None:
    if not are_states_own():
        raise UsageError(
            f"load_state_dict() of a {type(module).__name__} whose parameters an engine updates elsewhere\n"
            "  the engine would not see the new values, or has other shapes\n"
            "  call engine.load_state_dict(state) on all ranks, or load before parallelize()"
        )
