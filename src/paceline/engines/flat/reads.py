"""What users are told of units that are read beside their calls: what it costs, and how to cut the model better."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from paceline.engines.flat.unit import Unit
from paceline.models.registry import called_parts
from paceline.units import MIB


class Reads:
    """Which units were read beside their calls, and whether the user was told."""

    def __init__(self) -> None:
        self._readers: dict[int, set[str]] = {}  # by unit, the modules whose parameters were read
        self._is_noted = False

    def add(self, unit: Unit, module: str) -> None:
        """Notes a read of a module's parameter."""
        self._readers.setdefault(unit.index, set()).add(module)

    def note_once(self, model: nn.Module, units: Sequence[Unit], read: Sequence[int]) -> None:
        """Warns of the units of these numbers, which some rank has read; the first time only."""
        if not self._is_noted:
            self._is_noted = True
            readers = {units[number]: self._readers.get(number, set()) for number in read}
            warnings.warn(read_note(model, units, readers), stacklevel=3)


def read_note(model: nn.Module, units: Sequence[Unit], readers: Mapping[Unit, Collection[str]]) -> str:
    """Returns a note on units that were read while they were not gathered: in which modules, at what cost.

    ``units`` are all of the model, without the root. It proposes to cut a unit that nobody calls into its parts, and to
    leave one to the root that is called and read besides.
    """
    read = ", ".join(sorted({name for unit, names in readers.items() for name in names or [unit.name]}))
    names = ", ".join(unit.name for unit in readers)
    num_bytes = sum(group.size_bytes for unit in readers for group in unit.groups)
    better: list[str] = []
    for unit in units:
        if unit not in readers:
            better.append(unit.name)
        elif not unit.is_called and unit.name not in readers[unit]:
            children = model.get_submodule(unit.name).named_children()
            better += [name for child, inner in children for name, _ in called_parts(f"{unit.name}.{child}", inner)]
    cut = f"({', '.join(map(repr, better))},)" if better else "()"
    where = "units=... of parallelize(), parallel.units of a config" if better else "units=... of parallelize()"
    return (
        f"parameters of {read} were read while their unit ({names}) was not gathered\n"
        "  a unit is gathered when its module is called; one that is read otherwise stays whole until backward ends:\n"
        f"  {num_bytes / MIB:.3g} MiB more on each rank, and its gradients are reduced last, beside no computation\n"
        f"  cut the model where its modules are called, and leave the rest to the root: units={cut} ({where})"
    )


def late_read(unit: Unit, name: str) -> str:
    """Returns the error of a read that the other ranks do not know of."""
    return (
        f"parameters of {name} are read beside calls of their unit ({unit.name}), which is new after the first pass\n"
        "  the first pass settles when all ranks reduce the gradients of a unit, and this one's would come too late\n"
        f"  read them in the first step too, or leave {unit.name} to the root: units=... without it"
    )
