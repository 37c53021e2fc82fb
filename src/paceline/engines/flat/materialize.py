"""From a model to units, one at a time: at no moment is more than one unit (and the root) whole on a rank.

A model with values is moved unit by unit, and the values are those of rank 0. A model on the meta device has none: its
modules are initialised one by one, in the order of ``modules()`` and on the CPU, so that they draw the random numbers
that a single process would, and get the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.agree import broadcast_tensors
from paceline.engines.flat.partition import Named, owned_parameters
from paceline.engines.flat.unit import Attribute, Unit
from paceline.engines.precision import Precision, keeps_dtype
from paceline.errors import UsageError
from paceline.plan.layout import Offload


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
        _check_can_reset(model)
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
        self.first_name = {place: name for name, found in places.items() for place in found[:1]}
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


def _check_can_reset(model: nn.Module) -> None:
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
    direct = [_direct(module, builder) for module in modules]
    last = {builder.unit_of[name]: place for place, owned in enumerate(direct) for _, name in owned}
    for place, (module, owned) in enumerate(zip(modules, direct, strict=True)):
        if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
            module.to_empty(device=torch.device("cpu"), recurse=False)
            module.reset_parameters()  # type: ignore[operator]
        for attribute, name in owned:
            # The second place of a tied parameter draws its numbers too, as it would in one process, and drops them.
            if builder.first_name.get(Attribute(module, attribute)) == name:
                _fill(builder.unit(builder.unit_of[name]), name, module._parameters[attribute])
            module._parameters[attribute] = None  # the unit puts it back
        for index in {builder.unit_of[name] for _, name in owned}:
            if last[index] == place:
                builder.cut(index)


def _direct(module: nn.Module, builder: _Builder) -> list[tuple[str, str]]:
    """Returns the attributes of a module's own parameters, and the names that these are known by."""
    own = {(id(place.module), place.name): name for name, found in builder.places.items() for place in found}
    return [(a, own[id(module), a]) for a, parameter in module._parameters.items() if parameter is not None]


def _fill(unit: Unit, name: str, value: nn.Parameter | None) -> None:
    assert value is not None
    for group in unit.groups:
        if name in group.names:
            place = group.names.index(name)
            group.parameters[place].data.copy_(value)
