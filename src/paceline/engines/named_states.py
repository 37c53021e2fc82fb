"""States of a model whose parts lie on several ranks, by name: how they are collected, numbered and handed out.

An optimizer numbers its parameters in the order of its groups. One process has all of them; a rank of a pipeline has
those of its stages. Groups with the same settings on several ranks are one group of the whole model, in the model's
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object, gather_objects, receive_object, send_object
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.flat.optimizer_state import load_optimizer_state, numbered_parameters
from paceline.shards import own_optimizer_state

T = TypeVar("T")

PARCEL_BYTES = 16 << 20  # of one message: few messages for small values, little memory beside large ones
ParamGroups = list[tuple[dict[str, Any], list[str]]]  # settings, and the names of the parameters


def merge_over(comm: Communicator, mine: Mapping[str, T], *, rank0_only: bool = False) -> dict[str, T]:
    """Returns the values of all ranks by name, that of the first rank where several have one, in parcels."""
    if comm.size == 1:
        return dict(mine)
    everyone = gather_objects(comm, [(name, _num_bytes(value)) for name, value in mine.items()])
    found: dict[str, T] = dict(mine) if comm.rank == 0 or not rank0_only else {}
    for rank, names in _parcels(everyone):
        parcel = {name: mine[name] for name in names} if comm.rank == rank else {}
        if not rank0_only:
            found.update(broadcast_object(comm, parcel, rank))
        elif rank and comm.rank == rank:
            for work in send_object(comm, parcel, 0):
                work.wait()
        elif rank and comm.rank == 0:
            found.update(receive_object(comm, rank))
    return found


def _parcels(everyone: Sequence[Sequence[tuple[str, int]]]) -> Iterator[tuple[int, list[str]]]:
    """Yields which rank hands out which names together, each name once."""
    seen: set[str] = set()
    for rank, sizes in enumerate(everyone):
        parcel: list[str] = []
        filled = 0
        for name, num_bytes in sizes:
            if name in seen:
                continue
            seen.add(name)
            if parcel and filled + num_bytes > PARCEL_BYTES:
                yield rank, parcel
                parcel, filled = [], 0
            parcel.append(name)
            filled += num_bytes
        if parcel:
            yield rank, parcel


def _num_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_num_bytes, value.values())) if isinstance(value, Mapping) else 0


def global_groups(
    pipe: Communicator, optimizer: torch.optim.Optimizer, names: Mapping[int, str], order: Sequence[str]
) -> ParamGroups:
    """Returns the groups of the optimizer of one process, from those of all ranks of a pipeline."""
    mine = [
        ({key: value for key, value in group.items() if key != "params"}, [names[id(p)] for p in group["params"]])
        for group in optimizer.param_groups
    ]
    place = {name: index for index, name in enumerate(order)}
    merged: dict[str, tuple[dict[str, Any], set[str]]] = {}
    # A rank may lack a group, such as that of the biases: those that have most know the order.
    for theirs in sorted(gather_objects(pipe, mine), key=len, reverse=True):
        for settings, members in theirs:
            merged.setdefault(repr(sorted(settings.items())), (settings, set()))[1].update(members)
    return [(settings, sorted(members, key=lambda name: place[name])) for settings, members in merged.values()]


def named_states(
    optimizer: torch.optim.Optimizer, packed: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Returns the states of a state dict by the names of the parameters."""
    states = packed["state"]
    parameters = numbered_parameters(optimizer, packed)
    return {names[id(parameter)]: states[number] for number, parameter in parameters.items() if number in states}


def numbered_states(groups: ParamGroups, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state dict of one process."""
    numbers = {name: number for number, name in enumerate(name for _, members in groups for name in members)}
    return {
        "state": {numbers[name]: dict(states[name]) for name in numbers if name in states},
        "param_groups": [{**settings, "params": [numbers[n] for n in members]} for settings, members in groups],
    }


def load_by_name(
    optimizer: torch.optim.Optimizer,
    flat: Sequence[FlatGroup],
    groups: ParamGroups,
    state: Mapping[str, Any],
    names: Mapping[int, str],
    part: Callable[[str, Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Loads the state dict of one process: this rank's parameters, of which ``part`` cuts what it holds.

    Raises ValueError, before anything is changed, for another number of parameters or groups.
    """
    saved = state["param_groups"]
    sizes, expected = [len(group["params"]) for group in saved], [len(members) for _, members in groups]
    if sizes != expected:
        raise ValueError(f"the saved optimizer has groups of {sizes} parameters, this one of {expected}")
    by_name = {
        name: (state["state"].get(number), index)
        for index, ((_, members), group) in enumerate(zip(groups, saved, strict=True))
        for name, number in zip(members, group["params"], strict=True)
    }
    mine: dict[str, Any] = {"state": {}, "param_groups": []}
    for numbers, group in zip(own_optimizer_state(optimizer)["param_groups"], optimizer.param_groups, strict=True):
        own = [names[id(parameter)] for parameter in group["params"]]
        settings = saved[by_name[own[0]][1]] if own else group
        mine["param_groups"].append({**settings, "params": numbers["params"]})
        for number, name in zip(numbers["params"], own, strict=True):
            values = by_name[name][0]
            if values is not None:
                mine["state"][number] = part(name, values)
    load_optimizer_state(optimizer, flat, mine)
