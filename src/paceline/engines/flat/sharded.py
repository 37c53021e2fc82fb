"""What the engines have in common whose ranks update slices: clipping by the global norm, and whole states."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.batchnorm import standing_in
from paceline.engines.engine import ModuleEngine
from paceline.engines.flat.flat import FlatGroup, piece_places
from paceline.engines.flat.matrixwise import check_elementwise
from paceline.engines.flat.optimizer_state import gather_optimizer_state, load_optimizer_state, on_cpu


class ShardedEngine(ModuleEngine):
    """An engine whose optimizer updates this rank's pieces of the parameters."""

    _updated: dict[str, nn.Parameter]  # this rank's flat pieces, some of them empty, and what is not cut
    _is_plain = False  # whether pieces and parameters are the same, as on one rank that keeps no copies

    @property
    def holds_parts(self) -> bool:
        return not self._is_plain and self.gradient_comm.size > 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._updated.items())

    def sit_out(self) -> None:
        with standing_in(self.module):
            self.sit_out_forward()
            if torch.is_grad_enabled():
                self.sit_out_backward()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().check_optimizer(optimizer)
        if not self._is_plain:
            check_elementwise(optimizer)

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        named = dict(self.named_parameters())
        found = {name: None if p.grad is None else p.grad.to("cpu", copy=True) for name, p in named.items()}
        for group in () if self._is_plain else self.flat_groups:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in group.pieces]
            for name, piece, whole in zip(group.names, group.pieces, group.gather_whole(parts), strict=True):
                found[name] = None if piece.grad is None else whole.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns all parameters and buffers on the CPU, gathered one group at a time."""
        is_kept = self.gradient_comm.rank == 0 or not rank0_only
        whole: dict[int, torch.Tensor] = {}
        for group in self.flat_groups:
            tensors = group.gather_whole(group.pieces)
            if is_kept:
                for parameter, piece, tensor in zip(group.parameters, group.pieces, tensors, strict=True):
                    whole[id(parameter)] = whole[id(piece)] = on_cpu(tensor)
            del tensors
        state = self.module.state_dict(keep_vars=True) if is_kept else {}
        return {name: whole[id(value)] if id(value) in whole else on_cpu(value) for name, value in state.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads what ``full_state_dict`` gave: each rank takes its pieces, and the buffers.

        Raises RuntimeError as ``nn.Module.load_state_dict`` does, before anything has changed: names missing or not
        expected, other shapes.
        """
        mine = self.module.state_dict(keep_vars=True)
        places = piece_places(self.flat_groups)
        for group in self.flat_groups:
            places |= {id(p): (group, place) for place, p in enumerate(group.parameters)}
        problems = name_problems(mine, state)
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

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        return gather_optimizer_state(optimizer, self.flat_groups, comm=self.gradient_comm, rank0_only=rank0_only)

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
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
    return reduce_norm(local, comm, norm_type)


def reduce_norm(local: torch.Tensor, comm: Communicator, norm_type: float) -> torch.Tensor:
    """Returns the global norm, from each rank's sum of powers of the norms of its gradients, or the largest norm."""
    total, is_max = local.reshape(1), math.isinf(norm_type)
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


def name_problems(mine: Collection[str], state: Collection[str]) -> list[str]:
    """Lists the names of a model's state that another lacks, and those that it has besides."""
    missing = [f"missing {name}" for name in mine if name not in state]
    return missing + [f"unexpected {name}" for name in state if name not in mine]
