"""Optimizers over flat pieces: which ones can work on them, and their state as one process with whole ones has it.

    rank 0, a piece of 70 elements    exp_avg [70]    step []
    rank 1, a piece of 30 elements    exp_avg [30]    step []        whole:    exp_avg [10, 10]    step []

A state tensor with its piece's shape is a piece too: it is gathered, or cut. Everything else (a count of steps) is the
same on all ranks and stays as it is. Gathering needs memory for the result and for the flat buffer of one group.

SGD, Adam and their kin update an element from its own gradient and state, so a slice of a matrix is updated as the
whole matrix would be. Muon, Shampoo and Adafactor look at rows and columns, LARS and LAMB at the norm of a tensor: they
get whole parameters (``whole_updates.py``). Prodigy looks at all tensors together, and would compute something else,
without a word. No list of names can know every optimizer, so one of the same class and settings is tried out on a small
matrix, and others of it on slices, and on two matrices.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object, gather_objects, receive_object, send_object
from paceline.engines.flat.flat import FlatGroup, piece_places
from paceline.engines.flat.whole_updates import update_whole
from paceline.engines.groups import wait_for_all
from paceline.errors import UsageError
from paceline.shards import load_own_state, own_optimizer_state

_States = Mapping[int, Mapping[str, Any]]  # by the parameter's number in the optimizer, then by the state's name
_WHOLE_BY_NAME = "step"  # torch's own loading keeps this one apart too


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateRow:
    """What one rank holds for one parameter."""

    name: str
    is_empty: bool  # its piece has no elements
    dtypes: dict[str, torch.dtype | None] | None  # of the states that are pieces, None for whole ones; None: no state
    refused: str | None  # a state of which it cannot be told what it is


# What all ranks together hold, by the parameter's number, then by the state's name: the dtype of pieces, None for whole
# values, and the ranks that hold it.
_Kinds = dict[int, dict[str, tuple[torch.dtype | None, list[int]]]]


def gather_optimizer_state(
    optimizer: Optimizer, groups: Sequence[FlatGroup], *, comm: Communicator, rank0_only: bool = False
) -> dict[str, Any]:
    """Returns what ``optimizer.state_dict()`` of one process would be: whole tensors, copied to the CPU.

    All ranks call it. Costs one exchange of what there is, then one all-gather for each group and kind of state. Raises
    UsageError on all ranks for state that is neither a piece nor whole, or that is missing on some rank.
    """
    packed = own_optimizer_state(optimizer)
    states: _States = packed["state"]
    parameters = numbered_parameters(optimizer, packed)
    kinds = _agree(comm, _rows(parameters, groups, states))
    keeps = comm.rank == 0 or not rank0_only
    whole: dict[int, dict[str, Any]] = {index: dict.fromkeys(kinds[index]) for index in kinds}
    for index, key, holders in [(i, k, h) for i, found in kinds.items() for k, (d, h) in found.items() if d is None]:
        # A rank's own where all have one, else that of the first that does.
        value = on_cpu(states[index][key]) if comm.rank in holders else None
        whole[index][key] = value if len(holders) == comm.size else broadcast_object(comm, value, holders[0])
    numbers = {id(parameter): index for index, parameter in parameters.items()}
    for group in groups:
        for index, key, tensor in _gather_group(group, [numbers.get(id(p), -1) for p in group.pieces], states, kinds):
            if keeps:
                whole[index][key] = tensor.to("cpu", copy=True)
    if not keeps:
        return {}
    others = {key: value for key, value in states.items() if key not in parameters}
    result: dict[str, Any] = on_cpu({**packed, "state": others})
    return {**result, "state": {**whole, **result["state"]}}


def load_optimizer_state(optimizer: Optimizer, groups: Sequence[FlatGroup], state: Mapping[str, Any]) -> None:
    """Loads copies of whole tensors, each rank its pieces. Raises ValueError before anything is changed."""
    places = piece_places(groups)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    mine = dict(state)
    if len(saved) == len(parameters):  # else torch says what is wrong
        sharded = {i: places[id(p)] for i, p in zip(saved, parameters, strict=True) if id(p) in places}
        scalars = {_WHOLE_BY_NAME}  # states with one value for a parameter: of one element, shapes do not tell
        for index, (group, place) in sharded.items():
            shape = group.layout.slots[place].shape
            for key, value in state["state"].get(index, {}).items():
                if not isinstance(value, Tensor) or (value.numel() == 1 and tuple(value.shape) != shape):
                    scalars.add(key)
        if getattr(optimizer, "updates_whole", False):
            others = {i for i, (group, place) in sharded.items() if not group.layout.region(place).has_first}
            mine["state"] = {i: tree_map(_copied, values) for i, values in state["state"].items() if i not in others}
        else:
            mine["state"] = {
                index: _cut(values, sharded[index], scalars) if index in sharded else tree_map(_copied, values)
                for index, values in state["state"].items()
            }
    load_own_state(optimizer, mine)


def numbered_parameters(optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[int, nn.Parameter]:
    """Returns the optimizer's parameters by the numbers that its state dict gives them."""
    return {
        index: parameter
        for numbers, group in zip(packed["param_groups"], optimizer.param_groups, strict=True)
        for index, parameter in zip(numbers["params"], group["params"], strict=True)
    }


def _rows(parameters: Mapping[int, nn.Parameter], groups: Sequence[FlatGroup], states: _States) -> dict[int, _StateRow]:
    names = {id(piece): name for group in groups for name, piece in zip(group.layout.names, group.pieces, strict=True)}
    rows = {}
    for index, parameter in parameters.items():
        values, is_piece, refused = states.get(index), id(parameter) in names, None
        dtypes: dict[str, torch.dtype | None] = dict.fromkeys(values or {})
        for key, value in (values or {}).items() if is_piece else ():
            if isinstance(value, Tensor):
                dtypes[key] = value.dtype if value.shape == parameter.shape else None
            elif any(isinstance(leaf, Tensor) and leaf.shape == parameter.shape for leaf in tree_leaves(value)):
                refused = f"{key} (a {type(value).__name__} of tensors)"
        rows[index] = _StateRow(
            name=names.get(id(parameter), f"parameter {index}"),
            is_empty=is_piece and parameter.numel() == 0,
            dtypes=None if values is None else dtypes,
            refused=refused,
        )
    return rows


def _agree(comm: Communicator, rows: dict[int, _StateRow]) -> _Kinds:
    """Returns what the ranks hold together, so that all of them issue the same collectives."""
    everyone = gather_objects(comm, rows)
    for row in (row for theirs in everyone for row in theirs.values() if row.refused is not None):
        raise UsageError(
            f"the optimizer's state of {row.name} has {row.refused}\n"
            "  a sharded state is one tensor of the parameter's shape, or one value for the whole parameter\n"
            "  keep each tensor under a name of its own, or train with strategy = 'ddp'"
        )
    kinds: _Kinds = {}
    for index in sorted({index for theirs in everyone for index, row in theirs.items() if row.dtypes is not None}):
        held = [theirs[index].dtypes or {} for theirs in everyone]
        kinds[index] = {}
        for key in dict.fromkeys(key for dtypes in held for key in dtypes):
            holders = [rank for rank, dtypes in enumerate(held) if key in dtypes]
            found = [held[rank][key] for rank in holders]
            kinds[index][key] = (None if None in found else found[0], holders)
            missing = [r for r, theirs in enumerate(everyone) if r not in holders and not theirs[index].is_empty]
            if missing and None not in found:
                raise UsageError(
                    f"the optimizer's state {key} of {everyone[0][index].name} exists on rank {holders[0]}, "
                    f"but not on rank {missing[0]}, which holds a part of the parameter\n"
                    "  the whole state is made of every rank's part\n"
                    "  give the optimizer's step() gradients of the same parameters on every rank"
                )
    return kinds


def _gather_group(
    group: FlatGroup, members: Sequence[int], states: _States, kinds: _Kinds
) -> Iterator[tuple[int, str, Tensor]]:
    """Gathers one group's states, one kind at a time; ``members`` are its numbers, -1 for what is not updated."""
    by_place = [kinds.get(index, {}) for index in members]
    found = {(key, dtype): None for by_key in by_place for key, (dtype, _) in by_key.items() if dtype is not None}
    for key, dtype in found:
        held = [key in by_key and by_key[key][0] == dtype for by_key in by_place]
        nothing, pairs = group.master.new_zeros(()), zip(members, held, strict=True)
        pieces = [states.get(index, {}).get(key, nothing) if is_held else nothing for index, is_held in pairs]
        tensors = group.gather_whole([piece.to(dtype) for piece in pieces])
        yield from ((index, key, tensors[i]) for i, index in enumerate(members) if held[i])
        del tensors


def on_cpu(tree: Any) -> Any:
    """Returns a tree with copies of its tensors on the CPU."""
    return tree_map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, tree)


def _cut(values: Mapping[str, Any], where: tuple[FlatGroup, int], scalars: set[str]) -> dict[str, Any]:
    group, place = where
    shape = group.layout.slots[place].shape
    mine = {}
    for key, value in values.items():
        if not isinstance(value, Tensor) or (key in scalars and value.numel() == 1):
            mine[key] = tree_map(_copied, value)
        elif tuple(value.shape) != shape:
            raise ValueError(
                f"{key} of {group.layout.names[place]} is {list(value.shape)}, but the parameter {list(shape)}\n"
                "  a state that is loaded has whole tensors, as in one process, and each rank takes its part\n"
                "  load what optimizer.state_dict() gave on all ranks, or use paceline.save and paceline.load"
            )
        else:
            mine[key] = group.layout.cut_piece(place, value.detach()).to(group.master.device, copy=True)
    return mine


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


T = TypeVar("T")

# By name, of a model whose parts lie on several ranks. An optimizer numbers its parameters in the order of its groups.
# One process has all of them, a rank of a pipeline those of its stages. Groups with the same settings are one group.

PARCEL_BYTES = 16 << 20  # of one message: few messages for small values, little memory beside large ones
Names = Mapping[int, str]  # by the id of the parameter
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
            wait_for_all(send_object(comm, parcel, 0))
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
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_num_bytes, value.values())) if isinstance(value, Mapping) else 0


def global_groups(pipe: Communicator, optimizer: Optimizer, names: Names, order: Sequence[str]) -> ParamGroups:
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


def named_states(optimizer: Optimizer, packed: Mapping[str, Any], names: Names) -> dict[str, dict[str, Any]]:
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
    optimizer: Optimizer,
    flat: Sequence[FlatGroup],
    groups: ParamGroups,
    state: Mapping[str, Any],
    names: Names,
    part: Callable[[str, Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Loads this rank's ``part`` of one process's state. Raises ValueError, before any change, if it does not fit."""
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


_SHAPE = (6, 5)
_CUT = 13  # inside a row
_NUM_STEPS = 3
_LR = 0.01  # enough to see an update
_PLAIN = (bool, int, float, str, type(None))  # what is told apart by how it is written

# What speaks against slices for a class with certain settings, and against whole parameters each on a rank of its own.
Reasons = tuple[str | None, str | None]
_found: dict[tuple[object, ...], Reasons] = {}


def check_updates(optimizer: Optimizer, groups: Sequence[FlatGroup], *, are_whole: bool) -> None:
    """Lets an optimizer update pieces: as they are, or put together where ``are_whole`` says that this gives wholes.

    Raises UsageError for one that is known to compute something else then.
    """
    if getattr(optimizer, "gathers_matrices", False):
        return
    key = _what_counts(optimizer)
    in_slices, by_parameter = _found[key] if key in _found else _reasons_against(optimizer)
    if key is not None:
        _found[key] = in_slices, by_parameter
    if in_slices is None:
        return
    if by_parameter is None and are_whole:
        update_whole(optimizer, groups)
        return
    raise UsageError(
        f"{type(optimizer).__name__} cannot update sharded parameters: {in_slices}\n"
        "  ranks hold parts of the parameters, so each element, or each parameter, must be updated by itself alone\n"
        "  use strategy = 'ddp', where ranks hold whole parameters, or an optimizer such as AdamW"
    )


def _what_counts(optimizer: Optimizer) -> tuple[object, ...] | None:
    """Returns all that a trial depends on; None where settings are more than plain values."""
    first = optimizer.param_groups[0]["params"][0]
    settings = [_adapted(optimizer.defaults), *_distinct_settings(optimizer)]
    values = [value for each in settings for value in each.values()]
    leaves = [leaf for value in values for leaf in (value if type(value) is tuple else (value,))]
    if not all(type(leaf) in _PLAIN for leaf in leaves) or "step" in vars(optimizer):
        return None
    written = repr([sorted(each.items()) for each in settings])
    return type(optimizer), type(optimizer).step, first.device, first.dtype, written


def _reasons_against(optimizer: Optimizer) -> Reasons:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return ("its step() needs a closure, and looks at all parameters together",) * 2
    if isinstance(optimizer, torch.optim.SparseAdam):
        return ("it takes sparse gradients, and that of a slice is dense",) * 2
    first = optimizer.param_groups[0]["params"][0]
    for device, dtype in dict.fromkeys([(torch.device("cpu"), torch.float64), (first.device, first.dtype)]):
        with _undisturbed(device):
            values, gradients = _matrix(device, dtype)
            try:
                whole, again = _run(optimizer, values, gradients), _run(optimizer, values, gradients)
            except Exception:  # nosec B112  # not an optimizer that can be tried out here
                continue
            if not torch.equal(whole, again):
                return None, None  # it draws random numbers: what it does cannot be compared
            if (in_slices := _compare(optimizer, values, gradients, whole)) is None:
                return None, None
            is_alone = _is_same_update(_run(optimizer, values, gradients, beside=2), whole, values)
            return in_slices, None if is_alone else "it looks at all parameters together, of which a rank has some"
    return None, None


def _is_same_update(found: Tensor, whole: Tensor, values: Tensor) -> bool:
    update = (whole - values).flatten(1).abs().amax(1)
    difference = (found - whole).flatten(1).abs().amax(1)
    tolerance = 1e-6 if values.dtype == torch.float64 else 1e-2
    return bool((difference <= tolerance * update).all())


def _compare(optimizer: Optimizer, values: Tensor, gradients: Sequence[Tensor], whole: Tensor) -> str | None:
    """Returns what speaks against slices: each has an optimizer of its own here, as if it were on a rank of its own."""

    def run_slice(begin: int, end: int) -> Tensor:
        return _run(optimizer, values.view(-1)[begin:end], [each.view(-1)[begin:end] for each in gradients])

    try:
        slices = torch.cat([run_slice(0, _CUT), run_slice(_CUT, values.numel())], dim=1)
    except Exception as error:
        return f"it refuses flat slices ({_first_line(error)})"
    if not _is_same_update(slices.view_as(whole), whole, values):
        return "it looks at whole matrices, or at all parameters together, and gives slices another update"
    try:
        run_slice(_CUT, _CUT)
    except Exception as error:
        return f"it fails on a slice without elements, as some rank may get ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _run(optimizer: Optimizer, values: Tensor, gradients: Sequence[Tensor], beside: int = 0) -> Tensor:
    """Returns what an optimizer of the same class makes of ``values``, alone or ``beside`` others, for each setting."""
    settings = _distinct_settings(optimizer)
    tensors = [nn.Parameter(values.clone()) for _ in settings]
    others = [[nn.Parameter(values * (2 + number)) for number in range(beside)] for _ in settings]
    rows = zip(tensors, others, settings, strict=True)
    groups = [{"params": [tensor, *more], **each} for tensor, more, each in rows]
    make: Any = type(optimizer)
    accepted = inspect.signature(make).parameters
    twin = make(groups, **{key: value for key, value in _adapted(optimizer.defaults).items() if key in accepted})
    for gradient in gradients:
        for tensor in tensors:
            tensor.grad = gradient.clone()
        for number, other in enumerate(other for more in others for other in more):
            other.grad = gradient * (5 + number)
        twin.step()
    return torch.stack([tensor.detach() for tensor in tensors])


def _distinct_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of the parameter groups, without repetition: some give every layer a group."""
    found = {}
    for group in optimizer.param_groups:
        settings = _adapted({key: value for key, value in group.items() if key not in ("params", "param_names")})
        found[repr(sorted(settings.items()))] = settings
    return list(found.values())


def _adapted(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings for the trial, which may run on a CPU, and must not have a rate of zero."""
    changes = {"lr": _LR, "initial_lr": _LR, "fused": False, "capturable": False}
    return {key: changes.get(key, value) for key, value in settings.items()}


def _matrix(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(1 + _NUM_STEPS, *_SHAPE, generator=generator, dtype=torch.float64)
    rows = torch.linspace(1.0, 5.0, _SHAPE[0], dtype=torch.float64)[:, None]
    return (values * rows).to(device, dtype), [(3.0 * gradient / rows).to(device, dtype) for gradient in gradients]


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keeps what a trial does from being noticed: random states, warnings."""
    before = random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(before)
