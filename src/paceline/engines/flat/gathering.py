"""Gathering parameters while the model already runs: whoever takes one from its module waits for it.

    begin       issues the all-gathers of all groups, in the order in which forward uses them
    a module runs, or anybody reads ``module.weight``: waits for the groups up to the one that holds it
    end         waits for the rest

While groups are under way, a module's table of parameters is replaced by one that waits when it is asked. So a weight
that a parent reads, or that two modules share, cannot be read too early. What is kept elsewhere (a recurrent layer has
a list of its weights) is waited for at the beginning, and all that a compiled function reads before it runs.

Whether to gather is decided alike on all ranks: after a step of an optimizer that holds pieces, after a synchronised
backward (an update of another kind may follow), and when the masters' version has changed, which fused optimizers do
not raise.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from paceline.comm.base import Work
from paceline.engines.compiled import Compiled
from paceline.engines.flat.flat import FlatGroup

Table = dict[str, nn.Parameter | None]


class AskingTable(Table):
    """A module's table of parameters that asks ``current`` for the one that holds now, at each read.

    ``module.weight`` looks into ``module._parameters``. This table in its place notices whoever reads a weight.
    """

    def __init__(self, table: Table, current: Callable[[], Table]) -> None:
        super().__init__(table)
        self._current = current

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
                wait = functools.partial(self._wait_for_table, table, place)
                self._awaited.append((module.__dict__, AskingTable(table, wait)))

    @property
    def version(self) -> int:
        """A number that rises with every change of the masters that torch knows of."""
        return sum(group.master._version for group in self._groups)

    def begin(self, *, is_overlapped: bool) -> None:
        """Starts a call of the model: parameters are current, or will be when they are read."""
        if self.may_have_changed or self.version != self._seen_version:
            self._start()
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

    def _start(self) -> None:
        self._seen_version = self.version
        self.may_have_changed = False
        self._works = [group.gather() for group in self._groups]
        self._num_ready = 0

    def _wait_for(self, place: int) -> None:
        """Waits for the groups up to ``place``, and gives modules that are ready their tables back."""
        while self._num_ready <= place:
            self._works[self._num_ready].wait()
            for attributes, table in self._tables[self._num_ready]:
                attributes["_parameters"] = table
            self._num_ready += 1

    def _wait_for_table(self, table: Table, place: int) -> Table:
        self._wait_for(place)
        return table

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
        elif isinstance(module.forward, Compiled) or hasattr(module.forward, "_torchdynamo_orig_callable"):
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
