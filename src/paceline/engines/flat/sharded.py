"""What the engines have in common whose ranks update slices: whole states."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from paceline.engines.batchnorm import standing_in
from paceline.engines.flat.flat import piece_places
from paceline.engines.flat.matrixwise import check_elementwise
from paceline.engines.flat.optimizer_state import gather_optimizer_state, on_cpu
from paceline.engines.module_engine import ModuleEngine


class ShardedEngine(ModuleEngine):
    """An engine whose optimizer updates this rank's pieces of the parameters."""

    _updated: dict[str, nn.Parameter]  # this rank's flat pieces, some of them empty, and what is not cut
    _is_plain = False  # whether pieces and parameters are the same, as on one rank that keeps no copies

    @property
    def holds_parts(self) -> bool:
        return not self._is_plain and self.gradient_comm.size > 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._updated.items())

    def join_pass(self) -> None:
        with standing_in(self.module):
            self.join_forward()
            if torch.is_grad_enabled():
                self.join_backward()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().check_optimizer(optimizer)
        if not self._is_plain:
            check_elementwise(optimizer)

    def _gather_gradients(self) -> dict[str, torch.Tensor | None]:
        named = dict(self.named_parameters())
        found = {name: None if p.grad is None else p.grad.to("cpu", copy=True) for name, p in named.items()}
        for group in () if self._is_plain else self.flat_groups:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in group.pieces]
            for name, piece, whole in zip(group.layout.names, group.pieces, group.gather_whole(parts), strict=True):
                found[name] = None if piece.grad is None else whole.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def _gather_state(self, *, rank0_only: bool) -> dict[str, torch.Tensor]:
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
    def _load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Loads what ``_gather_state`` gave: each rank takes its pieces, and the buffers.

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
            group.pieces[place].copy_(group.layout.cut_piece(place, state[name]))

    def _gather_optimizer_state(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool) -> dict[str, Any]:
        return gather_optimizer_state(optimizer, self.flat_groups, comm=self.gradient_comm, rank0_only=rank0_only)


def name_problems(mine: Collection[str], state: Collection[str]) -> list[str]:
    """Lists the names of a model's state that another lacks, and those that it has besides."""
    missing = [f"missing {name}" for name in mine if name not in state]
    return missing + [f"unexpected {name}" for name in state if name not in mine]
