"""A unit: the parameters of one module, gathered, used, freed and reduced together.

    sharded --start_gather--> in flight --wait, show--> in use --hide, free--> sharded

While it is sharded, the module's attributes are this rank's flat pieces: a read outside of forward gives a tensor of
another shape and so a plain error, never stale values. A read inside of forward has the unit gathered (``on_read``):
the tables of its modules are then such that ask first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, Communicator, Work
from paceline.engines.flat.flat import FlatGroup, Float8Group, is_alone
from paceline.engines.flat.gathering import AskingTable, Route, Table, keeps_second_list
from paceline.engines.flat.shard import ShardGradients
from paceline.engines.float8 import travels_as_float8
from paceline.engines.groups import Groups, expert_dim, reduction, wait_for_all
from paceline.engines.precision import Precision
from paceline.models.registry import called_parts
from paceline.plan.layout import Offload
from paceline.units import MIB


@dataclass(frozen=True, slots=True)
class Attribute:
    """Where a parameter hangs in the model; a tied one has several such attributes."""

    module: nn.Module
    name: str
    tables: tuple[Table, ...] = ()  # the module's, where it has several by turns

    def put(self, parameter: nn.Parameter) -> None:
        if keeps_second_list(self.module):
            setattr(self.module, self.name, parameter)
        for table in self.tables or (self.module._parameters,):
            table[self.name] = parameter  # twenty times as fast as setattr


class Unit:
    """One module's parameters as flat groups: one for each dtype, trainable ones and frozen ones apart."""

    def __init__(
        self,
        index: int,
        name: str,
        named: Sequence[tuple[str, nn.Parameter]],
        groups: Groups,
        precision: Precision,
        offload: Offload,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """Takes parameters by name; those in ``kept`` compute in the dtype they were built with."""
        self.index = index
        self.name = name
        self.readers: set[str] = set()  # modules whose parameters were read beside calls of the unit
        kinds: dict[tuple[torch.dtype, bool, bool, str, bool, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            own = name if is_alone(parameter) else ""
            is_float8 = groups.shard.size > 1 and not offload.is_any and travels_as_float8(parameter)
            is_dense = expert_dim(parameter) is None
            kind = (parameter.dtype, parameter.requires_grad, name in kept, own, is_float8, is_dense)
            kinds.setdefault(kind, []).append((name, parameter))
        as_built = replace(precision, param_dtype=None)
        self.groups = [
            (Float8Group if is_float8 else FlatGroup)(
                members, groups.of(members[0][1]), as_built if is_kept else precision, offload
            )
            for (_, _, is_kept, _, is_float8, _), members in kinds.items()
        ]
        self.places: list[tuple[Attribute, nn.Parameter, nn.Parameter]] = []
        self._put = self.places  # those that are changed one by one; else a module's whole table is
        self._tables: list[tuple[dict[str, Any], Table, AskingTable]] = []  # of a module: whole parameters, or pieces
        self._is_shown = False
        self.in_use = False
        self.pass_number = -1  # the last pass in which it was gathered
        self.open_calls: Counter[int] = Counter()  # calls in forward whose backward has not ended, by that forward
        self.num_blind_calls = 0  # those that had no graph, so that backward will run them again
        self.is_complete = False  # all its gradients of this backward are there
        self._works: list[Work] = []
        self._reductions: list[tuple[FlatGroup, list[Tensor | None], Tensor, Work]] = []
        self._replications: list[tuple[Tensor, Tensor, Work]] = []
        self._small: Communicator | None = None

    def keep_slices(self, places_of: dict[str, list[Attribute]]) -> None:
        """Ends construction: every rank keeps its slice, and the model's attributes become the pieces."""
        for group in self.groups:
            group.keep_slice()
            for name, parameter, piece in zip(group.layout.names, group.parameters, group.pieces, strict=True):
                self.places += [(place, parameter, piece) for place in places_of[name]]
        self._is_shown = True
        self.free()

    def notice_reads(self, on_read: Callable[[nn.Module], bool]) -> dict[nn.Module, tuple[Table, ...]]:
        """Asks ``on_read`` when somebody takes a parameter that is not gathered; returns the tables of each module."""
        tables: dict[nn.Module, tuple[Table, ...]] = {}
        for module in {place.module: None for place, _, _ in self.places}:
            whole = module._parameters
            asking = AskingTable(whole, partial(on_read, module))
            module.__dict__["_parameters"] = asking
            self._tables.append((module.__dict__, whole, asking))
            tables[module] = (whole, asking)
            if keeps_second_list(module):  # its forward reads that list, not the table
                module.register_forward_pre_hook(lambda module, _: None if self._is_shown else on_read(module))
        self._put = [each for each in self.places if keeps_second_list(each[0].module)]
        for place, parameter, _ in self.places:
            tables[place.module][0][place.name] = parameter
        return tables

    def put_into(self, tables: Mapping[nn.Module, tuple[Table, ...]]) -> None:
        """Sees to parameters of this unit in modules that have several tables, because another unit has the rest."""
        self.places = [
            (replace(place, tables=tables.get(place.module, ())), parameter, piece)
            for place, parameter, piece in self.places
        ]
        self._put = self.places

    def start_gather(self) -> None:
        small = self._small
        self._works += [group.gather() if small is None else group.gather_within(small) for group in self.groups]

    def wait(self) -> None:
        wait_for_all(self._works)
        self._works.clear()

    def use(self) -> None:
        """Waits for the parameters and puts them into the module."""
        self.wait()
        self.in_use = True
        if not self._is_shown:
            self._is_shown = True
            for attributes, whole, _ in self._tables:
                attributes["_parameters"] = whole
            for place, parameter, _ in self._put:
                place.put(parameter)

    def hide(self) -> None:
        """Takes the parameters out of the module, so that the next read is noticed."""
        if self._is_shown:
            self._is_shown = False
            for place, _, piece in self._put:
                place.put(piece)
            for attributes, _, asking in self._tables:
                attributes["_parameters"] = asking

    def free(self) -> None:
        """Takes the parameters out of the module and frees them. Safe to call twice.

        On CUDA one stream allocates and computes, and a collective waits for it before it writes.
        """
        self.wait()
        self.in_use = False
        self.hide()
        for group in self.groups:
            group.free()

    def reshard(self, small: Communicator | None) -> None:
        """Frees all but a slice that ``small``, a part of the shard group, if any, can gather again in backward."""
        if small is not None:
            self.wait()
            for group in self.groups:
                group.keep_within(small)
        self.free()
        self._small = small

    def begin_forward(self) -> None:
        """Drops such slices, and follows a user who froze or unfroze a parameter: what they see is the piece."""
        self._small = None
        for group in self.groups:
            group.kept = None
        for _, parameter, piece in self.places:
            if parameter.requires_grad != piece.requires_grad:
                parameter.requires_grad_(piece.requires_grad)

    def start_reduce(self, *, averages_replicas: bool) -> list[str]:
        """Brings the gradients into flat buffers and issues the reduce-scatters; returns whose gradients there were."""
        used: list[str] = []
        for group in self.groups:
            if not any(parameter.requires_grad for parameter in group.parameters):
                continue
            mine = group.gradients.new_slice()
            # One rank's slice is the whole: what is brought in is the gradient.
            gradient = mine if group.comm.size == 1 else group.gradients.new_buffer()
            taken = [parameter.grad for parameter in group.parameters]
            for parameter in group.parameters:
                parameter.grad = None
            scale = group.shared.scale
            if not averages_replicas and group.comm.device_kind == "cpu":
                scale *= group.shared.replicate.size
            used += [name for name, source in zip(group.layout.names, taken, strict=True) if source is not None]
            work = group.gradients.side_stream.issue(partial(_reduce, group.gradients, gradient, mine, taken, scale))
            # What the device may still read and write stays alive with it.
            self._reductions.append((group, [gradient, *taken], mine, work))
        return used

    def finish_reduce(self, *, is_last: bool, is_final: bool) -> None:
        """Adds slices to the pieces' gradients. ``is_last`` microbatch; ``is_final``: they stay, and are measured."""
        for group, _, mine, work in self._reductions:
            work.wait()
            group.gradients.add(mine, is_last=is_last)
            if is_final:
                group.gradients.measure()
        self._reductions.clear()

    def start_replicate(self) -> None:
        """Issues the all-reduces of the slices' gradients over the replicas of a hybrid mesh, or what replaces them."""
        for group in self.groups:
            comm = group.shared.replicate
            mine = group.gradients.slice
            if mine is None or comm.size == 1:
                continue
            on_device = mine.to(comm.device)  # itself, unless it was offloaded
            if group.gradients.compressed is None:
                work = comm.all_reduce(on_device, reduction(comm))
            elif not group.gradients.is_cleared:
                work = group.gradients.compressed.start(on_device, comm)
            else:  # left over from an earlier step: nothing of it may be added to the residual
                continue
            self._replications.append((mine, on_device, work))

    def finish_replicate(self) -> None:
        for gradient, on_device, work in self._replications:
            work.wait()
            if on_device is not gradient:
                gradient.copy_(on_device)
        self._replications.clear()


@dataclass(slots=True, eq=False)
class Call:
    """One call of a unit in forward. Its backward has ended when the gradients of all its inputs are there."""

    unit: Unit
    forward: int
    num_inputs: int


@dataclass(slots=True, eq=False)
class Crossing:
    """A tensor between units: backward leaves the units that read it, then enters the one that made it."""

    engine: object
    forward: int
    ends: list[Call] = field(default_factory=list)
    begins: list[Unit] = field(default_factory=list)
    handle: Any = None  # of the hook on a leaf, which outlives the graph


@dataclass(slots=True)
class Pass:
    """Where this rank is in its passes, the order of collectives in each kind, and what ends a step."""

    training: Route
    evaluation: Route
    forward: Route  # of this pass, or the last one
    backward: Route
    backwards: dict[int, Route] = field(default_factory=dict)  # by the number of forwards that one backward undoes
    is_forward: bool = False
    is_backward: bool = False
    number: int = 0  # of forwards and backwards so far: in each, a unit is gathered when it is first needed
    num_forwards: int = 0  # that the next backward undoes
    forward_number: int = 0  # where each forward has a backward of its own: counts them
    undone: int = 0  # the forward that this backward belongs to
    reducing: Unit | None = None  # its gradients are under way
    landing: Unit | None = None  # the one before: its gradients may be on their way to the host
    read: set[Unit] = field(default_factory=set)  # in this forward, beside their calls
    used: set[str] = field(default_factory=set)  # parameters with gradients, since the last backward that synchronised


def _reduce(gradients: ShardGradients, whole: Tensor, mine: Tensor, taken: list[Tensor | None], scale: float) -> Work:
    gradients.copy_in(whole, taken, scale)
    return DONE if whole is mine else gradients.reduce_scatter(whole, mine)[1]


def read_note(model: nn.Module, units: Sequence[Unit], read: Sequence[Unit]) -> str:
    """Says which units were read while they were not gathered, at what cost, and how to cut the model instead."""
    modules = ", ".join(sorted({name for unit in read for name in unit.readers or [unit.name]}))
    names = ", ".join(unit.name for unit in read)
    num_bytes = sum(group.size_bytes for unit in read for group in unit.groups)
    better: list[str] = []
    for unit in units:
        if unit not in read:
            better.append(unit.name)
        elif not any(unit.open_calls.values()) and unit.name not in unit.readers:
            children = model.get_submodule(unit.name).named_children()
            better += [name for child, inner in children for name, _ in called_parts(f"{unit.name}.{child}", inner)]
    cut = f"({', '.join(map(repr, better))},)" if better else "()"
    where = "units=... of parallelize(), parallel.units of a config" if better else "units=... of parallelize()"
    return (
        f"parameters of {modules} were read while their unit ({names}) was not gathered\n"
        "  a unit is gathered when its module is called; one that is read otherwise stays whole until backward ends:\n"
        f"  {num_bytes / MIB:.3g} MiB more on each rank, and its gradients are reduced last, beside no computation\n"
        f"  cut the model where its modules are called, and leave the rest to the root: units={cut} ({where})"
    )
