"""Updates of whole parameters, for optimizers that look at more of a parameter than the slice that a rank holds.

    slices    | weight ........ | .. weight | bias | other ...... | ... other |
    owners     rank 0: weight    rank 1: bias, other               rank 2: none

The rank that holds a parameter's first element owns it: there the optimizer sees the parameter whole, with its whole
gradient, and keeps its whole state. Slices lie one after another, so of what a rank owns only the last parameter goes
on elsewhere, and of what it holds only the first was begun before. That one is handed over before a step, and comes
back after it: for each flat group two all-to-alls of at most one parameter a rank before the step, and one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.engines.flat.flat import FlatGroup


def update_whole(optimizer: Optimizer, groups: Sequence[FlatGroup]) -> None:
    """Lets an optimizer of pieces update whole parameters from now on, each on its owner. All ranks step together."""
    if not getattr(optimizer, "updates_whole", False):
        around = _WholeStep([_Edges(group) for group in groups])
        optimizer.register_step_pre_hook(around.begin)
        optimizer.register_step_post_hook(around.end)
        optimizer.updates_whole = True  # type: ignore[attr-defined]  # its states too are whole, on owners alone


class _Edges:
    """A flat group, what of this rank's last own parameter lies on others, and who owns what its slice begins with."""

    def __init__(self, group: FlatGroup) -> None:
        self.group, layout, comm = group, group.layout, group.comm
        owners = [slot.offset // layout.shard_length for slot in layout.slots]
        held = [place for place, (begin, end) in enumerate(layout.spans) if begin < end]
        self.owned = [place for place in held if owners[place] == comm.rank]
        self.before = next((place for place in held if owners[place] < comm.rank), None)
        self.given, self.taken = [0] * comm.size, [0] * comm.size  # elements of other ranks' parameters, and of ours
        if self.before is not None:
            self.given[owners[self.before]] = group.pieces[self.before].numel()
        for slot in (layout.slots[place] for place in self.owned[-1:]):
            for other in range(comm.rank + 1, comm.size):
                begin, end = layout.shard_range(other, comm.size)
                self.taken[other] = max(0, min(end, slot.offset + slot.numel) - begin)

    def gather(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns what is whole here of every rank's pieces, flat and by place: pieces themselves where they can be."""
        given, taken = self._buffers(pieces)
        if self.group.comm.size > 1:
            self.group.comm.all_to_all(taken, given, self.taken, self.given).wait()
        whole = {place: pieces[place] for place in self.owned}
        if taken.numel():
            whole[self.owned[-1]] = torch.cat([pieces[self.owned[-1]], taken.to(pieces[0].device)])
        return whole

    def scatter(self, pieces: Sequence[Tensor], whole: dict[int, Tensor]) -> None:
        """Puts updated values where ``gather`` had them from."""
        given, taken = self._buffers(pieces)
        if taken.numel():
            piece, values = pieces[self.owned[-1]], whole[self.owned[-1]]
            piece.copy_(values[: piece.numel()])
            taken.copy_(values[piece.numel() :])
        if self.group.comm.size > 1:
            self.group.comm.all_to_all(given, taken, self.given, self.taken).wait()
        if self.before is not None:
            pieces[self.before].copy_(given)

    def _buffers(self, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns what this rank gives to the owner of its first elements, and memory for what it takes."""
        device = self.group.comm.device
        taken = pieces[0].new_empty(sum(self.taken), device=device)
        return taken[:0] if self.before is None else pieces[self.before].to(device, copy=True), taken


class _WholeStep:
    """What happens before and after the step of an optimizer that gets whole parameters in the place of pieces."""

    def __init__(self, edges: Sequence[_Edges]) -> None:
        self._edges = edges
        self._pieces: list[list[nn.Parameter]] = []  # of each of the optimizer's groups, during a step
        self._values: list[dict[int, Tensor]] = []  # the whole parameters, flat, of each flat group
        self._whole: dict[nn.Parameter, nn.Parameter] = {}  # by piece

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:  # gradients are needed before anything is handed over
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        self._values, self._whole = [], {}
        for edges in self._edges:
            pieces, slots = edges.group.pieces, edges.group.layout.slots
            values = edges.gather([piece.detach() for piece in pieces])
            gradients = edges.gather([torch.zeros_like(p) if p.grad is None else p.grad for p in pieces])
            self._values.append(values)
            for place, flat in values.items():
                shape = slots[place].shape, slots[place].stride
                whole = nn.Parameter(flat.as_strided(*shape), requires_grad=pieces[place].requires_grad)
                whole.grad = None if pieces[place].grad is None else gradients[place].as_strided(*shape)
                self._whole[pieces[place]] = whole
        cut = {piece for edges in self._edges for piece in edges.group.pieces}
        self._pieces = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            own = [self._whole.get(each, each) for each in group["params"]]
            group["params"] = [each for each in own if each not in cut]
        _move_states(optimizer, self._whole)
        return args, kwargs

    @torch.no_grad()
    def end(self, optimizer: Optimizer, *_: Any) -> None:
        for group, pieces in zip(optimizer.param_groups, self._pieces, strict=True):
            group["params"] = pieces
        _move_states(optimizer, {whole: piece for piece, whole in self._whole.items()})
        for edges, values in zip(self._edges, self._values, strict=True):
            edges.scatter([piece.detach() for piece in edges.group.pieces], values)
        self._values, self._whole = [], {}


def _move_states(optimizer: Optimizer, places: dict[nn.Parameter, nn.Parameter]) -> None:
    for before, now in places.items():
        if before in optimizer.state:
            optimizer.state[now] = optimizer.state.pop(before)
