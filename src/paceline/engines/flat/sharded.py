"""What the engines have in common whose ranks update slices: clipping by the global norm, and whole states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.engine import ModuleEngine
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.flat.matrixwise import check_elementwise
from paceline.engines.flat.optimizer_state import gather_optimizer_state, load_optimizer_state


class ShardedEngine(ModuleEngine):
    """An engine whose optimizer updates this rank's pieces of the parameters."""

    _is_plain = False  # whether pieces and parameters are the same, as on one rank that keeps no copies

    def abandon_accumulation(self) -> None:
        """Forgets the passes since the last one that reduced: which parameters they used is settled by reducing."""
        self.sit_out()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError unless the optimizer updates pieces of this engine, element by element."""
        super().check_optimizer(optimizer)
        if not self._is_plain:
            check_elementwise(optimizer)

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Returns the reduced gradients, whole, on the CPU; None where no rank had one."""
        named = dict(self.named_parameters())
        found = {name: None if p.grad is None else p.grad.to("cpu", copy=True) for name, p in named.items()}
        for group in () if self._is_plain else self.flat_groups:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in group.pieces]
            for name, piece, whole in zip(group.names, group.pieces, group.gather_whole(parts), strict=True):
                found[name] = None if piece.grad is None else whole.to("cpu", copy=True)
        return found

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns all parameters and buffers on the CPU, gathered one group at a time."""
        return gather_state(self.module, self.flat_groups, self.comm, rank0_only=rank0_only)

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads what ``full_state_dict`` gave: each rank takes its pieces."""
        load_state(self.module, self.flat_groups, state)

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the optimizer's state as one process would have it."""
        return gather_optimizer_state(optimizer, self.flat_groups, comm=self.comm, rank0_only=rank0_only)

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads what ``full_optimizer_state`` gave, each rank its part."""
        load_optimizer_state(optimizer, self.flat_groups, state)


@torch.no_grad()
def clip_pieces(
    pieces: Sequence[nn.Parameter],
    comm: Communicator,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    norms: Sequence[torch.Tensor] | None = None,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clips gradients of which every rank of ``comm`` has pieces; returns their global norm.

    One all-reduce. The coefficient stays on the device: nothing waits for it. An infinite ``max_norm`` only measures.
    ``norms`` are those of the pieces, and ``squares`` the sum of all ranks', where these are known already.
    """
    gradients = [piece.grad for piece in pieces if piece.grad is not None and piece.grad.numel()]
    device = gradients[0].device if gradients else comm.device
    norm = squares.sqrt() if squares is not None else _global_norm(gradients, pieces, comm, norm_type, norms)
    if not math.isinf(max_norm) and gradients:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(device)
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].dtype))
    return norm


def _global_norm(
    gradients: list[torch.Tensor],
    pieces: Sequence[nn.Parameter],
    comm: Communicator,
    norm_type: float,
    norms: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    is_max = math.isinf(norm_type)
    if norms is None:
        norms = torch._foreach_norm(gradients, norm_type) if gradients else []
    if norms:
        stacked = torch.stack(list(norms)).to(comm.device)
        if norm_type == 2.0:
            local = torch.dot(stacked, stacked)
        else:
            local = stacked.max() if is_max else (stacked**norm_type).sum()
    else:
        local = torch.zeros((), dtype=pieces[0].dtype if pieces else torch.float32, device=comm.device)
    total = local.reshape(1)
    if is_max:  # the larger of a number and nan is the number, to some backends
        total.masked_fill_(total.isnan(), math.inf)
    if comm.size > 1:
        comm.all_reduce(total, "max" if is_max else "sum").wait()
    return total[0] if is_max else total[0] ** (1.0 / norm_type)


def measured_norms(groups: Sequence[FlatGroup]) -> list[torch.Tensor] | None:
    """Returns the norms that were taken in backward; None unless they are those of all gradients there are now."""
    norms: list[torch.Tensor] = []
    for group in groups:
        if any(piece.grad is not None for piece in group.pieces):
            measured = group.norms()
            if measured is None:
                return None
            norms += measured
    return norms or None


@torch.no_grad()
def gather_state(
    module: nn.Module, groups: Sequence[FlatGroup], comm: Communicator, *, rank0_only: bool
) -> dict[str, torch.Tensor]:
    """Returns the module's state dict with whole tensors on the CPU, made one group at a time."""
    is_kept = comm.rank == 0 or not rank0_only
    whole: dict[int, torch.Tensor] = {}
    for group in groups:
        tensors = group.gather_whole(group.pieces)
        if is_kept:
            for parameter, piece, tensor in zip(group.parameters, group.pieces, tensors, strict=True):
                whole[id(parameter)] = whole[id(piece)] = tensor.to("cpu", copy=True)
        del tensors
    if not is_kept:
        return {}
    state = module.state_dict(keep_vars=True)
    return {
        name: whole[id(value)] if id(value) in whole else value.detach().to("cpu", copy=True)
        for name, value in state.items()
    }


@torch.no_grad()
def load_state(module: nn.Module, groups: Sequence[FlatGroup], state: dict[str, torch.Tensor]) -> None:
    """Takes this rank's pieces, and the buffers, from whole tensors.

    Raises RuntimeError as ``nn.Module.load_state_dict`` does, before anything has changed: names missing or not
    expected, other shapes.
    """
    mine = module.state_dict(keep_vars=True)
    places: dict[int, tuple[FlatGroup, int]] = {}
    for group in groups:
        for place, (parameter, piece) in enumerate(zip(group.parameters, group.pieces, strict=True)):
            places[id(parameter)] = places[id(piece)] = (group, place)
    problems = [f"missing {name}" for name in mine if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in mine]
    for name, value in mine.items():
        if name in state:
            shape = tuple(value.shape)
            if id(value) in places:
                group, place = places[id(value)]
                shape = group.layout.slots[place].shape
            if tuple(state[name].shape) != shape:
                problems.append(f"{name} has shape {tuple(state[name].shape)}, the model's is {shape}")
    if problems:
        raise RuntimeError("the state does not fit the model: " + "; ".join(problems))
    for name, value in mine.items():
        if id(value) not in places:
            value.copy_(state[name])
            continue
        group, place = places[id(value)]
        group.pieces[place].copy_(group.cut_piece(place, state[name]))
