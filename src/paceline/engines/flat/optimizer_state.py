"""An optimizer's state over flat pieces, seen from outside as the state of one process with whole parameters.

Under sharding an optimizer holds, for each parameter, the state of the *piece* that lies in this rank's slice:

    rank 0, a piece of 70 elements    exp_avg [70]    step []
    rank 1, a piece of 30 elements    exp_avg [30]    step []        whole:    exp_avg [10, 10]    step []

A state tensor with its piece's shape is a piece too: it is gathered, or cut. Everything else (a count of steps) is the
same on all ranks and stays as it is. Gathering needs memory for the result and for the flat buffer of one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.engines.flat.flat import FlatGroup
from paceline.errors import UsageError

_States = Mapping[int, Mapping[str, Any]]  # by the parameter's number in the optimizer, then by the state's name
_WHOLE_BY_NAME = "step"  # torch's own loading keeps this one apart too


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateRow:
    """What one rank holds for one parameter."""

    name: str
    is_empty: bool = False  # its piece has no elements
    dtypes: dict[str, torch.dtype | None] | None = None  # of the states that are pieces, None for whole ones
    refused: str | None = None  # a state of which it cannot be told what it is


@dataclass(slots=True, kw_only=True)
class _StateKind:
    """What all ranks together hold as one state of one parameter: pieces of ``dtype``, or a whole value (None)."""

    dtype: torch.dtype | None
    holders: list[int] = field(default_factory=list)


def gather_optimizer_state(
    optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup], *, comm: Communicator, rank0_only: bool = False
) -> dict[str, Any]:
    """Returns what ``optimizer.state_dict()`` of one process would be: whole tensors, copied to the CPU.

    The optimizer updates pieces of ``groups``, some or all, and perhaps plain parameters of the same values on every
    rank. All ranks of ``comm`` call it; with ``rank0_only`` the others take part and get an empty dict. Costs one
    exchange of what there is, then one all-gather for each group and kind of state.

    Raises UsageError on all ranks for state that is neither a piece nor whole, or that is missing on some rank.
    """
    packed = optimizer.state_dict()
    parameters = numbered_parameters(optimizer, packed)
    kinds = _agree(comm, _rows(parameters, groups, packed["state"]))
    keeps = comm.rank == 0 or not rank0_only
    whole: dict[int, dict[str, Any]] = {index: dict.fromkeys(kinds[index]) for index in kinds}
    _share_whole_values(comm, packed["state"], kinds, whole)
    numbers = {id(parameter): index for index, parameter in parameters.items()}
    for group in groups:
        members = [numbers.get(id(piece)) for piece in group.pieces]
        _gather_group(group, members, packed["state"], kinds, whole if keeps else None)
    if not keeps:
        return {}
    others = {key: value for key, value in packed["state"].items() if key not in parameters}
    result: dict[str, Any] = on_cpu({**packed, "state": others})
    result["state"] = {**whole, **result["state"]}
    return result


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup], state: Mapping[str, Any]
) -> None:
    """Loads a state of whole tensors, each rank its pieces: from any number of ranks, sharded or not.

    As strict as ``optimizer.load_state_dict``, and about shapes too: raises ValueError before anything is changed. The
    optimizer keeps nothing of ``state`` itself, so ranks that share a process may load the same one.
    """
    places = _places(groups)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    mine = dict(state)
    if len(saved) == len(parameters):  # else torch says what is wrong
        sharded = {i: places[id(p)] for i, p in zip(saved, parameters, strict=True) if id(p) in places}
        scalars = _scalar_names(state["state"], sharded)
        mine["state"] = {
            index: _cut(values, sharded[index], scalars) if index in sharded else tree_map(_copied, values)
            for index, values in state["state"].items()
        }
    optimizer.load_state_dict(mine)


# What there is.


def numbered_parameters(optimizer: torch.optim.Optimizer, packed: Mapping[str, Any]) -> dict[int, nn.Parameter]:
    """Returns the optimizer's parameters by the numbers that its state dict gives them."""
    return {
        index: parameter
        for numbers, group in zip(packed["param_groups"], optimizer.param_groups, strict=True)
        for index, parameter in zip(numbers["params"], group["params"], strict=True)
    }


def _places(groups: Sequence[FlatGroup]) -> dict[int, tuple[FlatGroup, int]]:
    """Returns where each piece belongs, by its id."""
    return {id(piece): (group, place) for group in groups for place, piece in enumerate(group.pieces)}


def _rows(parameters: Mapping[int, nn.Parameter], groups: Sequence[FlatGroup], states: _States) -> dict[int, _StateRow]:
    """Describes this rank's state."""
    places = _places(groups)
    rows = {}
    for index, parameter in parameters.items():
        if id(parameter) in places:
            group, place = places[id(parameter)]
            rows[index] = _piece_row(group.names[place], parameter, states.get(index))
        else:
            values = states.get(index)
            rows[index] = _StateRow(name=f"parameter {index}", dtypes=None if values is None else dict.fromkeys(values))
    return rows


def _piece_row(name: str, piece: nn.Parameter, values: Mapping[str, Any] | None) -> _StateRow:
    is_empty = piece.numel() == 0
    if values is None:
        return _StateRow(name=name, is_empty=is_empty)
    dtypes: dict[str, torch.dtype | None] = {}
    for key, value in values.items():
        dtypes[key] = None
        if isinstance(value, torch.Tensor):
            if value.shape == piece.shape:
                dtypes[key] = value.dtype
        elif any(isinstance(leaf, torch.Tensor) and leaf.shape == piece.shape for leaf in tree_leaves(value)):
            return _StateRow(name=name, refused=f"{key} (a {type(value).__name__} of tensors)")
    return _StateRow(name=name, is_empty=is_empty, dtypes=dtypes)


def _agree(comm: Communicator, rows: dict[int, _StateRow]) -> dict[int, dict[str, _StateKind]]:
    """Returns what the ranks hold together, so that all of them issue the same collectives."""
    everyone = gather_objects(comm, rows)
    agreed: dict[int, dict[str, _StateKind]] = {}
    for rank, theirs in enumerate(everyone):
        for index, row in theirs.items():
            if row.refused is not None:
                raise UsageError(
                    f"the optimizer's state of {row.name} has {row.refused}\n"
                    "  a sharded state is one tensor of the parameter's shape, or one value for the whole parameter\n"
                    "  keep each tensor under a name of its own, or train with strategy = 'ddp'"
                )
            for key, dtype in (row.dtypes or {}).items():
                kind = agreed.setdefault(index, {}).setdefault(key, _StateKind(dtype=dtype))
                kind.dtype = None if dtype is None else kind.dtype
                kind.holders.append(rank)
            if row.dtypes is not None:
                agreed.setdefault(index, {})
    for index in agreed:
        _check_complete(index, agreed[index], everyone)
    return dict(sorted(agreed.items()))


def _check_complete(index: int, kinds: dict[str, _StateKind], everyone: list[dict[int, _StateRow]]) -> None:
    for key, kind in kinds.items():
        if kind.dtype is None or len(kind.holders) == len(everyone):
            continue
        missing = [r for r in range(len(everyone)) if r not in kind.holders and not everyone[r][index].is_empty]
        if missing:
            raise UsageError(
                f"the optimizer's state {key} of {everyone[0][index].name} exists on rank {kind.holders[0]}, "
                f"but not on rank {missing[0]}, which holds a part of the parameter\n"
                "  the whole state is made of every rank's part\n"
                "  give the optimizer's step() gradients of the same parameters on every rank"
            )


# Gathering.


def _share_whole_values(
    comm: Communicator, states: _States, kinds: dict[int, dict[str, _StateKind]], whole: dict[int, dict[str, Any]]
) -> None:
    """Fills in the values that are whole: a rank's own where all have one, else those of the first that does."""
    for index, by_key in kinds.items():
        for key, kind in by_key.items():
            if kind.dtype is not None:
                continue
            value = on_cpu(states[index][key]) if comm.rank in kind.holders else None
            whole[index][key] = (
                value if len(kind.holders) == comm.size else broadcast_object(comm, value, kind.holders[0])
            )


def _gather_group(
    group: FlatGroup,
    members: list[int | None],
    states: _States,
    kinds: dict[int, dict[str, _StateKind]],
    whole: dict[int, dict[str, Any]] | None,
) -> None:
    """Gathers one group's states, one kind at a time, and copies them into ``whole`` where it is given.

    ``members`` are the numbers of the group's parameters, None for one that the optimizer does not update.
    """
    by_place = [kinds.get(index, {}) if index is not None else {} for index in members]
    found = {(key, kind.dtype): None for by_key in by_place for key, kind in by_key.items() if kind.dtype is not None}
    for key, dtype in found:
        is_held = [key in by_key and by_key[key].dtype == dtype for by_key in by_place]
        pieces = []
        for place, index in enumerate(members):
            value = states.get(index, {}).get(key) if index is not None and is_held[place] else None
            pieces.append(group.pieces[place].new_zeros(()) if value is None else value)
        tensors = group.gather_whole([piece.to(dtype) for piece in pieces])
        for index, tensor, held in zip(members, tensors, is_held, strict=True):
            if whole is not None and held and index is not None:
                whole[index][key] = tensor.to("cpu", copy=True)
        del tensors


def on_cpu(tree: Any) -> Any:
    """Returns a tree with copies of its tensors on the CPU."""
    return tree_map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, tree)


# Loading.


def _scalar_names(states: _States, sharded: Mapping[int, tuple[FlatGroup, int]]) -> set[str]:
    """Returns the names of states with one value for a whole parameter.

    A parameter of one element cannot tell them from pieces by their shapes; the other parameters can.
    """
    names = {_WHOLE_BY_NAME}
    for index, (group, place) in sharded.items():
        shape = group.layout.slots[place].shape
        for key, value in states.get(index, {}).items():
            if not isinstance(value, torch.Tensor) or (value.numel() == 1 and tuple(value.shape) != shape):
                names.add(key)
    return names


def _cut(values: Mapping[str, Any], where: tuple[FlatGroup, int], scalars: set[str]) -> dict[str, Any]:
    """Returns this rank's part of one parameter's state."""
    group, place = where
    shape = group.layout.slots[place].shape
    mine = {}
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or (key in scalars and value.numel() == 1):
            mine[key] = tree_map(_copied, value)
        elif tuple(value.shape) != shape:
            raise ValueError(f"{key} of {group.names[place]} is {list(value.shape)}, but the parameter {list(shape)}")
        else:
            mine[key] = group.cut_piece(place, value.detach()).to(group.master.device, copy=True)
    return mine


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
