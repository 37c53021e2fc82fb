"""Units of a sharded model: which modules are gathered together, and how a model becomes units.

A unit is a module that is called: its parameters are gathered just before its forward and freed after it. The model
itself is the *root* unit: it has what no other unit has, and stays gathered through forward and backward.

Units are built one at a time, so that one unit (and the root) is whole on a rank, with the values of rank 0. Modules on
the meta device are initialised one by one, in the order of ``modules()`` and on the CPU, so that they draw the numbers
that a single process would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.engines.flat.gathering import held_elsewhere, keeps_second_list
from paceline.engines.flat.unit import Attribute, Unit
from paceline.engines.groups import Groups, broadcast_tensors
from paceline.engines.precision import Precision, keeps_dtype
from paceline.errors import UsageError
from paceline.models.hugging_face import is_unfilled
from paceline.models.registry import can_be_called
from paceline.plan.layout import Offload
from paceline.units import MIB

Named = tuple[str, nn.Module]
Parameters = list[tuple[str, nn.Parameter]]  # with their names
Tensors = dict[str, Any]  # a module's own, by attribute; None where it has none of that name


def choose_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ends: Sequence[nn.Module] = (),
    *,
    names: Sequence[str] | None = None,
    unit_mb: float | None = None,
    apart: Sequence[nn.Module] = (),
    parts: Sequence[nn.Module] = (),
) -> list[Named]:
    """Returns the units below the root, outermost first, in the order of definition.

    By name where ``names`` are given; by size where ``unit_mb`` is: the largest modules that are not larger, without
    those that are read ``apart`` from their calls; otherwise the blocks, ``parts`` in the place of the one that has
    them, and those of the ``ends`` that are as large: all that is in the root stays gathered for long. Raises
    UsageError for names that are not modules of the model.
    """
    if names is not None:
        return _by_name(model, names)
    if unit_mb is not None:
        kept = frozenset(id(module) for module in apart)
        return [unit for unit in _by_size(model, unit_mb * MIB, kept) if unit[1] is not model]
    inside = {id(part) for part in parts}
    chosen = {id(block) for block in blocks if not any(id(module) in inside for module in block.modules())} | inside
    largest = max((_num_bytes(block) for block in blocks), default=0)
    chosen |= {id(end) for end in ends if _num_bytes(end) >= largest > 0}
    return [(name, module) for name, module in model.named_modules() if id(module) in chosen and module is not model]


def owned_parameters(model: nn.Module, units: Sequence[Named]) -> list[Parameters]:
    """Returns the parameters of each unit, and of the root last.

    A parameter belongs to the innermost unit around it; to the root, which is gathered whenever any unit runs, where
    several use it (tied weights), or an attribute of another kind keeps it, such as a plain list.
    """
    innermost = {each: {len(units)} for owner, each in held_elsewhere(model) if not keeps_second_list(owner)}
    first_name: dict[nn.Parameter, str] = {}
    prefixes = sorted(((name, index) for index, (name, _) in enumerate(units)), key=lambda pair: -len(pair[0]))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name.setdefault(parameter, name)
        inside = next((index for prefix, index in prefixes if name.startswith(prefix + ".")), len(units))
        innermost.setdefault(parameter, set()).add(inside)
    owned: list[Parameters] = [[] for _ in range(len(units) + 1)]
    for parameter, name in first_name.items():
        users = innermost[parameter]
        owned[users.pop() if len(users) == 1 else len(units)].append((name, parameter))
    return owned


def _by_name(model: nn.Module, names: Sequence[str]) -> list[Named]:
    modules = dict(model.named_modules(remove_duplicate=False))
    wrong = [name for name in names if name not in modules or not name]
    if wrong:
        known = ", ".join(name for name in list(modules)[1:8])
        raise UsageError(
            f"units = {list(names)}: no module is called {', '.join(map(repr, wrong))}\n"
            f"  a unit is a module of the model below its root, by its name\n  the first modules are {known}"
        )
    seen: dict[nn.Module, str] = {}
    for name in names:
        if modules[name] in seen:
            raise UsageError(
                f"units {seen[modules[name]]!r} and {name!r} are one and the same module\n"
                "  a module is gathered by one unit\n  name it once: it may be called as often as you like"
            )
        seen[modules[name]] = name
    return [(name, modules[name]) for name in modules if name in set(names)]


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _by_size(module: nn.Module, limit: float, apart: frozenset[int], name: str = "") -> list[Named]:
    num_bytes = _num_bytes(module)
    if num_bytes == 0 or id(module) in apart:
        return []
    is_whole = can_be_called(module) and not any(id(inner) in apart for inner in module.modules())
    if name and num_bytes <= limit and is_whole:
        return [(name, module)]
    if name and isinstance(module, nn.MultiheadAttention):
        return [(name, module)]  # it reads its inner layer's weights without calling it
    prefix = f"{name}." if name else ""
    inner = [unit for child, sub in module.named_children() for unit in _by_size(sub, limit, apart, prefix + child)]
    is_leaf = not any(any(True for _ in child.parameters()) for child in module.children())
    return [(name, module)] if is_leaf and name and can_be_called(module) else inner


def build_units(
    model: nn.Module, units: Sequence[Named], groups: Groups, precision: Precision, offload: Offload
) -> list[Unit]:
    """Shards a model, with the values of the first rank of those that average gradients; its units, the root last."""
    comm = groups.gradients
    owned = owned_parameters(model, units)
    places = _places(model)
    names = [*(name for name, _ in units), ""]
    kept = frozenset(name for name, found in places.items() if any(keeps_dtype(place.module) for place in found))

    def make(index: int) -> Unit:
        return Unit(index, names[index], owned[index], groups, precision, offload, kept)

    def cut(unit: Unit) -> None:  # rank 0's values for all, of which each rank keeps its slice
        for group in unit.groups:
            holders = group.shared.gradients
            if holders.size > 1 and not group.is_unfilled:
                holders.broadcast(group.full.data).wait()
        unit.keep_slices(places)

    made: dict[int, Unit] = {}
    # A device without values needs none.
    if comm.device.type != "meta" and any(p.is_meta and not is_unfilled(p) for p in model.parameters()):
        made = _initialise(model, owned, make, cut)
    for index in range(len(owned)):
        if index not in made:
            made[index] = make(index)
            cut(made[index])
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(comm.device)
    broadcast_tensors(comm, list(model.buffers()))
    precision.cast_buffers(model)
    return [made[index] for index in range(len(owned))]


def _places(model: nn.Module) -> dict[str, list[Attribute]]:
    names: dict[nn.Parameter, str] = {}
    places: dict[str, list[Attribute]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{attribute}" if prefix else attribute
                places.setdefault(names.setdefault(parameter, full), []).append(Attribute(module, attribute))
    return places


@torch.no_grad()
def _initialise(
    model: nn.Module, owned: Sequence[Parameters], make: Callable[[int], Unit], cut: Callable[[Unit], None]
) -> dict[int, Unit]:
    """Initialises module by module; a unit is made with its first values, and cut when its last module is done."""
    owner = {id(parameter): (index, name) for index, named in enumerate(owned) for name, parameter in named}
    last = {owner[id(p)][0]: module for module in model.modules() for p in module._parameters.values() if p is not None}
    units: dict[int, Unit] = {}
    filled: set[str] = set()
    for module, before, _ in reset_modules(model):
        own = {attribute: owner[id(parameter)] for attribute, parameter in before.items() if parameter is not None}
        for attribute, (index, name) in own.items():
            if index not in units:
                units[index] = make(index)
            # The second place of a tied parameter draws its numbers too, as it would in one process, and drops them.
            if name not in filled:
                filled.add(name)
                group = next(group for group in units[index].groups if name in group.layout.names)
                group.parameters[group.layout.names.index(name)].data.copy_(module.get_parameter(attribute))
            module._parameters[attribute] = None  # the unit puts it back
        for index in {index for index, _ in own.values()}:
            if last[index] is module:
                cut(units[index])
    return units


def reset_modules(model: nn.Module) -> Iterator[tuple[nn.Module, Tensors, Tensors]]:
    """Gives the modules of a model on the meta device values, one by one, as they draw them in one process.

    Yields each module that has tensors, filled, with the parameters and buffers that it had before: the caller takes
    the values away, so that only one module is whole. Raises UsageError for modules that cannot draw their values.
    """
    filled = {
        module: name or type(module).__name__
        for name, module in model.named_modules()
        if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
    }
    stuck = [name for module, name in filled.items() if not callable(getattr(module, "reset_parameters", None))]
    if stuck:
        raise UsageError(
            f"the model is on the meta device, and {', '.join(stuck[:5])} cannot be initialised\n"
            "  a module with parameters or buffers needs a method reset_parameters() that gives them values\n"
            "  add it, or build the model on the CPU"
        )
    for module in filled:
        before = {**module._parameters}, {**module._buffers}
        module.to_empty(device=torch.device("cpu"), recurse=False)
        module.reset_parameters()
        yield module, *before
