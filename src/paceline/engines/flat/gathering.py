"""Gathering parameters while the model already runs. ``Gathering`` (ZeRO): who takes one from its module waits for it.

    begin       issues the all-gathers of all groups, in the order in which forward uses them
    a module runs, or anybody reads ``module.weight``: waits for the groups up to the one that holds it
    end         waits for the rest

While groups are under way, a module's table of parameters is replaced by one that waits when it is asked. So a weight
that a parent reads, or that two modules share, cannot be read too early. What is kept elsewhere (a recurrent layer has
a list of its weights) is waited for at the beginning, and all that a compiled function reads before it runs. Whether to
gather is decided alike on all ranks: after a step of an optimizer that holds pieces, after a synchronised backward (an
update of another kind may follow), and when the masters' version has changed, which fused optimizers do not raise.

``Route`` (full sharding): the collectives of a pass, in the one order in which all ranks issue them, whatever branch of
the model each of them takes. The first pass *learns* it: before each collective the ranks tell one another what they
want next, and all do the same one of these. Later passes *follow* it without asking: a rank that needs a leg first does
those before it that it did not need itself (it gathers for the others, and gives zeros to a reduction). So a rank may
skip units, and none ever waits for a collective that another never issues.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from paceline.comm.base import Communicator, Work, control_device
from paceline.engines.blocks import compiled_inside
from paceline.engines.flat.flat import FlatGroup
from paceline.errors import UsageError

Table = dict[str, nn.Parameter | None]


class AskingTable(Table):
    """A module's table of parameters that asks at each read whether those now in ``whole`` are there, or its own hold.

    ``module.weight`` looks into ``module._parameters``. This table in its place notices whoever reads a weight.
    """

    def __init__(self, whole: Table, ask: Callable[[], bool]) -> None:
        """Keeps as its own what ``whole`` has at this moment."""
        super().__init__(whole)
        self._whole, self._ask = whole, ask

    def _current(self) -> Table:
        return self._whole if self._ask() else dict(self)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._current()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._current().get(name, default)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        return self._current().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        return self._current().values()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain tables: nobody gathers their parameters."""
        return dict, (dict(self),)


def keeps_second_list(module: nn.Module) -> bool:
    """Says whether a module keeps a list of its weights beside the table, as recurrent layers do: it sees to that."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def held_elsewhere(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Finds parameters that modules keep in attributes of their own, such as plain lists."""
    for owner in module.modules():
        others = {k: v for k, v in vars(owner).items() if k not in ("_parameters", "_buffers", "_modules")}
        yield from ((owner, leaf) for leaf in tree_leaves(others) if isinstance(leaf, nn.Parameter))


class Gathering:
    """The flat groups of a module, gathered when they may have changed and awaited where they are used."""

    # Torch has one list of hooks for all optimizers, which must not change while a step goes through it; a gathering,
    # however, may be freed at any moment. So one hook stays there for all of them.
    alive: ClassVar[weakref.WeakSet[Gathering]] = weakref.WeakSet()
    _hook: ClassVar[Any] = None

    def __init__(self, module: nn.Module, groups: Sequence[FlatGroup]) -> None:
        self.may_have_changed = False
        self.owner: object = None  # what lives as long as the module
        self.pieces = {id(piece) for group in groups for piece in group.pieces}
        self._groups = list(groups)
        self._seen_version = self.version
        self._is_inside = False
        self._works: list[Work] = []
        self._held_elsewhere = {id(parameter) for _, parameter in held_elsewhere(module)}
        self._eager: list[nn.Module] = []
        self._compiled: list[nn.Module] = []
        if self._groups:
            self._visit(module, set())
            if Gathering._hook is None:
                Gathering._hook = register_optimizer_step_post_hook(_tell_of_step)
            Gathering.alive.add(self)
        self.arrange(self._groups)

    def arrange(self, groups: Sequence[FlatGroup]) -> None:
        """Sets the order in which groups are gathered. Nothing may be under way."""
        self._groups = list(groups)
        place_of = {id(p): place for place, group in enumerate(self._groups) for p in group.parameters}

        def last(numbers: Iterable[int]) -> int:
            return max((place_of.get(number, -1) for number in numbers), default=-1)

        self._num_ready = len(self._groups)
        self._last_early = last(self._held_elsewhere)
        # By group: the tables of the modules that need nothing behind it.
        self._tables: list[list[tuple[dict[str, Any], Table]]] = [[] for _ in self._groups]
        self._awaited: list[tuple[dict[str, Any], AskingTable]] = []
        self._place_of_compiled = {module: last(map(id, module.parameters())) for module in self._compiled}
        for module in self._eager:
            table = module._parameters
            place = last(map(id, table.values()))
            if place >= 0:
                self._tables[place].append((module.__dict__, table))
                wait = functools.partial(self._wait_for, place)
                self._awaited.append((module.__dict__, AskingTable(table, wait)))

    @property
    def version(self) -> int:
        """A number that rises with every change of the masters that torch knows of."""
        return sum(group.master._version for group in self._groups)

    def begin(self, *, is_overlapped: bool) -> None:
        """Starts a call of the model: parameters are current, or will be when they are read."""
        if self.may_have_changed or self.version != self._seen_version:
            self._seen_version = self.version
            self.may_have_changed = False
            self._works = [group.gather() for group in self._groups]
            self._num_ready = 0
            if is_overlapped and self._last_early < len(self._groups) - 1:
                for attributes, awaited in self._awaited:
                    attributes["_parameters"] = awaited  # setattr would take twenty times as long
                self._wait_for(self._last_early)
            else:
                self._wait_for(len(self._groups) - 1)
        self._is_inside = True

    def end(self) -> None:
        """Ends a call of the model, or one that failed: waits for what nobody has asked for."""
        self._is_inside = False
        self._wait_for(len(self._groups) - 1)

    def refresh(self) -> None:
        """Gathers and waits, if parameters may have changed. All ranks call it."""
        self.begin(is_overlapped=False)
        self.end()

    def _wait_for(self, place: int) -> bool:
        """Waits for the groups up to ``place``, which are there then; gives modules that are ready their own tables."""
        while self._num_ready <= place:
            self._works[self._num_ready].wait()
            for attributes, table in self._tables[self._num_ready]:
                attributes["_parameters"] = table
            self._num_ready += 1
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of a watched module have hooks that do nothing: nobody gathers their parameters."""
        return Gathering, (nn.Module(), ())

    def _visit(self, module: nn.Module, seen: set[nn.Module]) -> None:
        """Finds the modules that read parameters, and those that do so in compiled code."""
        if module in seen:
            return
        seen.add(module)
        if getattr(module, "_compiled_call_impl", None) is not None:  # hooks and all: nothing runs before it
            self._held_elsewhere.update(id(parameter) for parameter in module.parameters())
        elif compiled_inside(module.forward) or hasattr(module.forward, "_torchdynamo_orig_callable"):
            self._compiled.append(module)
            module.register_forward_pre_hook(self._enter_compiled, prepend=True)
        else:
            if module._parameters:
                self._eager.append(module)
                module.register_forward_pre_hook(self._enter, prepend=True)
            for child in module.children():
                self._visit(child, seen)

    def _enter(self, *_: Any) -> None:
        """Runs before a module that is called by itself, outside of a call of the model."""
        # In backward a checkpointed module runs again, with the parameters that it had.
        if not self._is_inside and torch._C._current_graph_task_id() == -1:
            self.refresh()

    def _enter_compiled(self, module: nn.Module, _: Any) -> None:
        if self._is_inside:
            self._wait_for(self._place_of_compiled[module])
        self._enter()


def _tell_of_step(optimizer: Optimizer, *_: Any) -> None:
    for gathering in list(Gathering.alive):
        if any(id(p) in gathering.pieces for group in optimizer.param_groups for p in group["params"]):
            gathering.may_have_changed = True


_END = -1


class Leg(NamedTuple):
    """One collective of a pass: a unit is gathered, or its gradients are reduced."""

    unit: int
    kind: Literal["gather", "reduce"]

    @property
    def is_gather(self) -> bool:
        return self.kind == "gather"


def complete(learned: Sequence[Leg], order: Sequence[Leg]) -> list[Leg]:
    """Inserts the legs of ``order`` that were not learned, each before the first that follows it there."""
    legs = list(dict.fromkeys(learned))
    for place in reversed(range(len(order))):
        if order[place] in legs:
            continue
        later = set(order[place + 1 :])
        legs.insert(next((i for i, leg in enumerate(legs) if leg in later), len(legs)), order[place])
    return legs


def issue_plan(legs: Sequence[Leg], prefetch: int) -> list[list[Leg]]:
    """Returns what is issued when the pass begins, and when each leg is reached: the leg itself, unless that is done,
    and the next gathers ahead of use.

    The same on every rank. A unit is gathered at most ``prefetch`` gathers early, which bounds the memory.
    """
    issued: set[int] = set()  # places in ``legs``

    def next_gathers(start: int) -> list[Leg]:
        ahead = [i for i in range(start, len(legs)) if legs[i].is_gather][:prefetch]
        fresh = [i for i in ahead if i not in issued]
        issued.update(fresh)
        return [legs[i] for i in fresh]

    plan = [next_gathers(0)]
    for place, leg in enumerate(legs):
        now = [] if place in issued else [leg]
        issued.add(place)
        plan.append(now + (next_gathers(place + 1) if leg.is_gather else []))
    return plan


@dataclass(slots=True, eq=False)
class Route:
    """One pass's legs, and how far this rank has come."""

    comm: Communicator
    order: Sequence[Leg]
    names: Sequence[str]  # of the units
    issue: Callable[[Leg], None]  # starts a leg's collective
    release: Callable[[Leg], None]  # is called for a gather that this rank has passed by without use
    prefetch: int
    legs: list[Leg] | None = None
    repeated: set[Leg] = field(default_factory=set)  # what the first pass did more than once
    read: set[Leg] = field(default_factory=set)  # units that some rank read beside their calls; the same on all ranks
    _learned: list[Leg] = field(default_factory=list)
    _position: int = 0
    _place_of: dict[Leg, int] = field(default_factory=dict)
    _is_ahead: bool = False
    _plan: list[list[Leg]] = field(default_factory=lambda: [[]])  # what is issued at first, and at each leg

    @property
    def is_learning(self) -> bool:
        """Whether the ranks still ask one another."""
        return self.legs is None

    def begin(self) -> None:
        self._position = 0
        self._learned = []
        self._is_ahead = False

    def look_ahead(self) -> None:
        """Issues the first gathers, ahead of use. Once in a pass, at the same place on all ranks: before any leg."""
        if not self._is_ahead:
            self._is_ahead = True
            for leg in self._plan[0]:
                self.issue(leg)

    def reach(self, leg: Leg, *, is_read: bool = False) -> None:
        """Issues ``leg``, and those passed by before it. ``is_read``: of a parameter, beside calls, which all learn."""
        if self.legs is None:
            while self._agree(leg, is_read=is_read) != leg:
                pass
            return
        self.look_ahead()
        place = self._place_of[leg]
        if place < self._position:
            raise UsageError(
                f"rank {self.comm.rank} needs unit {self.names[leg.unit]} again, after the ranks had passed it\n"
                "  the first pass has settled the order in which all ranks gather and reduce their units\n"
                "  call every unit as often and in the same order as in the first step, keep units gathered\n"
                "  (reshard_after_forward=False), or make one unit of those whose order changes"
            )
        while self._position <= place:
            self._go_on(is_used=self._position == place)

    def reach_ready(self, is_ready: Callable[[Leg], bool]) -> None:
        """Issues the reductions that come next, as far as ``is_ready`` says so of each."""
        while self.legs is not None and self._position < len(self.legs):
            leg = self.legs[self._position]
            if leg.is_gather or not is_ready(leg):
                return
            self.look_ahead()
            self._go_on(is_used=True)

    def finish(self, drop: Callable[[Leg], bool] = lambda _leg: False) -> None:
        """Ends the pass: does what the other ranks may still need. A first pass leaves ``drop`` out of later ones."""
        if self.legs is None:
            while self._agree(None) is not None:
                pass
            for leg in self.order:  # reductions that nobody asked for: of units without inputs that want gradients
                if not leg.is_gather and leg not in self._learned:
                    self._learned.append(leg)
                    self.issue(leg)
            self.repeated = {leg for leg in self._learned if self._learned.count(leg) > 1}
            self.order = tuple(leg for leg in self.order if not drop(leg))
            self.legs = complete([leg for leg in self._learned if not drop(leg)], self.order)
            self._place_of = {leg: place for place, leg in enumerate(self.legs)}
            self._plan = issue_plan(self.legs, self.prefetch)
            self._position = len(self.legs)
            return
        self.look_ahead()
        while self._position < len(self.legs):
            self._go_on(is_used=False)

    def _go_on(self, *, is_used: bool) -> None:
        leg = (self.legs or ())[self._position]
        self._position += 1
        for each in self._plan[self._position]:
            self.issue(each)
        if leg.is_gather and not is_used:
            self.release(leg)

    def _agree(self, want: Leg | None, *, is_read: bool = False) -> Leg | None:
        """Asks all ranks what they want (None: nothing more), does the leg furthest behind, and returns it. Syncs."""
        device = control_device(self.comm)
        number = _END if want is None else 2 * self.order.index(want) + is_read
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        wants = torch.empty(self.comm.size, dtype=torch.int64, device=device)
        self.comm.all_gather(wants, mine).wait()
        asked: list[int] = [number for number in wants.tolist() if number != _END]
        if not asked:
            return None
        leg = self.order[min(asked) // 2]
        if 2 * self.order.index(leg) + 1 in asked:
            self.read.add(leg)
        self._learned.append(leg)
        self.issue(leg)
        if leg != want and leg.is_gather:
            self.release(leg)
        return leg
