"""The updates of optimizers in a loop of the user's own: which of them count, and what is noted of each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FrameType

import torch

from paceline.comm.ledger.loop_counters import LoopCounters
from paceline.health.pairing import Update


class TrainedParameters:
    """The parameters of engines, which ranks train together. Those that are gone do not count."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # by identity: tensors do not compare to a truth

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        self._known.update((id(each), weakref.ref(each)) for each in parameters)

    def has_any(self) -> bool:
        """Says whether there was an engine."""
        return bool(self._known)

    def are_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Says whether an optimizer updates them, by its first parameter."""
        first = next(iter(optimizer.param_groups[0]["params"]), None)
        known = self._known.get(id(first))
        return known is not None and known() is first


class UpdateNotes:
    """Makes what is noted of each update of one rank."""

    def __init__(self) -> None:
        self._counters = LoopCounters()
        self._last = Update(collectives=0, updates=0)

    def next(self, collectives: int, place: int, frame: FrameType | None) -> Update:
        """Returns the next update, after so many collectives of all ranks; the code at ``frame`` made it."""
        last = self._last
        is_fresh = collectives > last.collectives
        self._last = Update(
            collectives=collectives,
            updates=last.updates + 1,
            idle=last.idle + (not is_fresh),
            is_fresh=is_fresh,
            counters=self._counters.read(frame),
            place=place,
        )
        return self._last

    def name_of(self, counter: int | None) -> str:
        """Returns the name of a counter; an empty one for what is none."""
        return self._counters.names.get(counter or 0, "")
