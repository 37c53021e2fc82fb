"""Units of a sharded model: which modules are gathered together, and how a model becomes units.

A unit is a module whose parameters are gathered just before its forward and freed after it. The model itself is the
last resort, the *root* unit: it has what no other unit has, and stays gathered through forward and backward. Good units
are called one after another and are neither so small that latency counts nor so large that two do not fit: the repeated
blocks of a model, as they are or several together.

Units are built one at a time: at no moment is more than one unit (and the root) whole on a rank. A model with values is
moved unit by unit, and the values are those of rank 0. A model on the meta device has none: its modules are initialised
one by one, in the order of ``modules()`` and on the CPU, so that they draw the random numbers that a single process
would, and get the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.agree import broadcast_tensors
from paceline.engines.flat.unit import Attribute, Unit
from paceline.engines.precision import Precision, keeps_dtype
from paceline.errors import UsageError
from paceline.plan.layout import Offload
from paceline.units import MIB

Named = tuple[str, nn.Module]


def choose_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ends: Sequence[nn.Module] = (),
    *,
    names: Sequence[str] | None = None,
    unit_mb: float | None = None,
    apart: Sequence[nn.Module] = (),
) -> list[Named]:
    """Returns the units below the root, outermost first, in the order of definition.

    By name where ``names`` are given; by size where ``unit_mb`` is: the largest modules that are not larger; otherwise
    the model's blocks, and those of its ``ends`` that are as large: all that is in the root stays gathered for long.
    By size, modules that are read ``apart`` from their calls are left to the root.
    Raises UsageError for names that are not modules of the model.
    """
    if names is not None:
        return _by_name(model, names)
    if unit_mb is not None:
        kept = frozenset(id(module) for module in apart)
        return [unit for unit in _by_size(model, unit_mb * MIB, kept) if unit[1] is not model]
    chosen = {id(block) for block in blocks}
    largest = max((_num_bytes(block) for block in blocks), default=0)
    chosen |= {id(end) for end in ends if _num_bytes(end) >= largest > 0}
    return [(name, module) for name, module in model.named_modules() if id(module) in chosen and module is not model]


def owned_parameters(model: nn.Module, units: Sequence[Named]) -> list[list[tuple[str, nn.Parameter]]]:
    """Returns the parameters of each unit, and of the root last.

    A parameter belongs to the innermost unit around it. One that several units use (tied weights, a module with two
    parents) belongs to the root, which is gathered whenever any of them runs.
    """
    innermost: dict[int, set[int]] = {}
    first_name: dict[int, tuple[str, nn.Parameter]] = {}
    prefixes = sorted(((name, index) for index, (name, _) in enumerate(units)), key=lambda pair: -len(pair[0]))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(parameter), (name, parameter))
        inside = next((index for prefix, index in prefixes if name.startswith(prefix + ".")), len(units))
        innermost.setdefault(id(parameter), set()).add(inside)
    owned: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(units) + 1)]
    for key, named in first_name.items():
        users = innermost[key]
        owned[users.pop() if len(users) == 1 else len(units)].append(named)
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
    seen: dict[int, str] = {}
    for name in names:
        if id(modules[name]) in seen:
            raise UsageError(
                f"units {seen[id(modules[name])]!r} and {name!r} are one and the same module\n"
                "  a module is gathered by one unit\n  name it once: it may be called as often as you like"
            )
        seen[id(modules[name])] = name
    return [(name, modules[name]) for name in modules if name in set(names)]


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _by_size(module: nn.Module, limit: float, apart: frozenset[int], name: str = "") -> list[Named]:
    num_bytes = _num_bytes(module)
    if num_bytes == 0 or id(module) in apart:
        return []
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList)
    is_whole = not is_list and not any(id(inner) in apart for inner in module.modules())
    if name and num_bytes <= limit and is_whole:
        return [(name, module)]
    if name and isinstance(module, nn.MultiheadAttention):
        return [(name, module)]  # it reads its inner layer's weights without calling it
    prefix = f"{name}." if name else ""
    inner = [unit for child, sub in module.named_children() for unit in _by_size(sub, limit, apart, prefix + child)]
    is_leaf = not any(any(True for _ in child.parameters()) for child in module.children())
    return [(name, module)] if is_leaf and name else inner


def build_units(
    model: nn.Module,
    units: Sequence[Named],
    comm: Communicator,
    shards: Communicator,
    precision: Precision,
    offload: Offload,
) -> list[Unit]:
    """Shards a model over ``shards``, with the values of rank 0 of ``comm``; returns its units, the root last."""
    owned = owned_parameters(model, units)
    places = _places(model)
    names = [*(name for name, _ in units), ""]
    builder = _Builder(names, owned, places, comm, shards, precision, offload)
    # A device without values needs none.
    if comm.device.type != "meta" and any(parameter.is_meta for parameter in model.parameters()):
        check_can_reset(model)
        _initialise(model, builder)
    return builder.finish(model)


class _Builder:
    """Makes each unit when it is first asked for, and cuts it when it is complete."""

    def __init__(
        self,
        names: Sequence[str],
        owned: list[list[tuple[str, nn.Parameter]]],
        places: dict[str, list[Attribute]],
        comm: Communicator,
        shards: Communicator,
        precision: Precision,
        offload: Offload,
    ) -> None:
        self.owned = owned
        self.places = places
        self.name_at = {place: name for name, found in places.items() for place in found}
        self.unit_of = {name: index for index, named in enumerate(owned) for name, _ in named}
        self._comm = comm
        self._args = (shards, precision, offload)
        self._kept = frozenset(name for name, found in places.items() if any(keeps_dtype(p.module) for p in found))
        self._names = names
        self._units: dict[int, Unit] = {}
        self._done: set[int] = set()

    def unit(self, index: int) -> Unit:
        """Returns a unit with memory for its whole parameters."""
        if index not in self._units:
            self._units[index] = Unit(index, self._names[index], self.owned[index], *self._args, self._kept)
        return self._units[index]

    def cut(self, index: int) -> None:
        """Ends a unit: rank 0's values for all, of which each rank keeps its slice."""
        unit = self.unit(index)
        self._done.add(index)
        for group in unit.groups:
            if self._comm.size > 1:
                self._comm.broadcast(group.full.data).wait()
        unit.keep_slices(self.places)

    def finish(self, model: nn.Module) -> list[Unit]:
        """Cuts what is left, and moves the buffers, whose values are those of rank 0 too."""
        for index in range(len(self.owned)):
            if index not in self._done:
                self.cut(index)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._comm.device)
        broadcast_tensors(self._comm, list(model.buffers()))
        self._args[1].cast_buffers(model)
        return [self._units[index] for index in range(len(self.owned))]


def _places(model: nn.Module) -> dict[str, list[Attribute]]:
    """Returns where each parameter hangs, by its first name."""
    names: dict[int, str] = {}
    places: dict[str, list[Attribute]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{attribute}" if prefix else attribute
                places.setdefault(names.setdefault(id(parameter), full), []).append(Attribute(module, attribute))
    return places


def check_can_reset(model: nn.Module) -> None:
    """Raises UsageError for a model with modules that cannot draw the values of their tensors."""
    stuck = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
        and not callable(getattr(module, "reset_parameters", None))
    ]
    if stuck:
        raise UsageError(
            f"the model is on the meta device, and {', '.join(stuck[:5])} cannot be initialised\n"
            "  a module with parameters or buffers needs a method reset_parameters() that gives them values\n"
            "  add it, or build the model on the CPU"
        )


@torch.no_grad()
def _initialise(model: nn.Module, builder: _Builder) -> None:
    """Initialises module by module; a unit is cut when its last module is done."""
    modules = list(model.modules())
    # Of each module's own parameters the attribute, and the name that it is known by.
    direct = [
        [(a, builder.name_at[Attribute(module, a)]) for a, p in module._parameters.items() if p is not None]
        for module in modules
    ]
    last = {builder.unit_of[name]: place for place, owned in enumerate(direct) for _, name in owned}
    for place, (module, owned) in enumerate(zip(modules, direct, strict=True)):
        if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
            module.to_empty(device=torch.device("cpu"), recurse=False)
            module.reset_parameters()  # type: ignore[operator]
        for attribute, name in owned:
            # The second place of a tied parameter draws its numbers too, as it would in one process, and drops them.
            if builder.places[name][0] == Attribute(module, attribute):
                groups = builder.unit(builder.unit_of[name]).groups
                group = next(group for group in groups if name in group.names)
                group.parameters[group.names.index(name)].data.copy_(module.get_parameter(attribute))
            module._parameters[attribute] = None  # the unit puts it back
        for index in {builder.unit_of[name] for _, name in owned}:
            if last[index] == place:
                builder.cut(index)
