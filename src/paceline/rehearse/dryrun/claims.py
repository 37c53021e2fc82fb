"""What memory of a dry run is for: what the engine, its optimizer and all else of a step hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.engines.flat.flat import FlatGroup
from paceline.rehearse.dryrun.held import HOST, HeldMemory
from paceline.rehearse.dryrun.parts import StepPieces


def claim_states(memory: HeldMemory, parts: StepPieces) -> None:
    """Says what the engine and the optimizer hold."""
    engine = parts.engine
    for group in engine.flat_groups:
        if group.comes_and_goes:
            memory.follow(group.full, "temporary")
            _look_after(group, memory)
        memory.claim([group.master] if group.resident is None else [group.master, group.resident], "parameters")
        if group.gradient is not None:
            memory.claim([group.gradient], "gradients")
    memory.claim(engine.parameters(), "parameters")
    memory.claim(engine.module.parameters(), "parameters")
    memory.claim(engine.module.buffers(), "buffers")
    for parameter, average in () if parts.average is None else parts.average.pairs():
        memory.claim([average], HOST if memory.is_on_host(parameter) else "optimizer")
    if parts.compressor is not None:
        memory.claim(parts.compressor.held(), "buffers")
    for parameter, state in parts.optimizer.state.items():
        states = (value for value in state.values() if isinstance(value, torch.Tensor))
        memory.claim(states, HOST if memory.is_on_host(parameter) else "optimizer")


def _look_after(group: FlatGroup, memory: HeldMemory) -> None:
    """Looks at followed storages when a group's memory comes or goes: after every kernel would take long."""
    for name in ("allocate", "free"):
        if name not in vars(group):
            vars(group)[name] = functools.partial(_then_look, group, getattr(group, name), memory)


def _then_look(group: FlatGroup, change: Callable[[], None], memory: HeldMemory) -> None:
    change()
    memory.look()
    if group.resident is not None:  # another one after each update
        memory.claim([group.resident], "parameters")


def watch_gradients(memory: HeldMemory, model: nn.Module) -> None:
    """Says of gradients what they are as they arrive."""

    def claim(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            memory.claim([parameter.grad], "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(claim)  # type: ignore[no-untyped-call]


def watch_update(memory: HeldMemory, parts: StepPieces) -> None:
    """Says before each update what gradients are."""

    def claim(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        held = (*parts.engine.parameters(), *parts.engine.module.parameters())
        memory.claim((p.grad for p in held if p.grad is not None), "gradients")

    parts.optimizer.register_step_pre_hook(claim)
