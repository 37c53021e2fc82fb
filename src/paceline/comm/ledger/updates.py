"""The updates of optimizers in a loop of the user's own: which of them count, and what is noted of each."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType

import torch

from paceline.comm.ledger.loop_counters import LoopCounters
from paceline.health.pairing import Update

_NUM_FIRST = 32  # updates that are all noted
_MORE_BITS = 3  # of the number of collectives between notes, beyond those of a step


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
    """Counts the updates of one rank, and makes what is noted of some of them.

    Noting costs a hundred microseconds or more, where a step has left nothing of it in the caches. So a rank notes its
    first updates, then those that are the first after a multiple of a number of collectives, which is between four and
    eight times that of a step; and whenever the last note is ``seldom_s`` seconds old. Ranks that have issued the same
    collectives note the same updates, but for the last rule, and in slow loops by that one too.
    """

    def __init__(self, *, seldom_s: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._counters = LoopCounters()
        self._seldom_s, self._now = seldom_s, now
        self._collectives = self._updates = self._idle = 0
        self._noted_s = -math.inf
        self._is_noted = True

    def count(self, collectives: int) -> bool:
        """Counts an update after so many collectives of all ranks; returns whether it is to be noted."""
        new, before = collectives - self._collectives, self._collectives
        self._collectives = collectives
        self._updates += 1
        self._is_noted = new <= 0
        if self._is_noted:
            self._idle += 1
            return False
        if self._updates <= _NUM_FIRST or (before ^ collectives) >> new.bit_length() + _MORE_BITS:
            return True
        return self._now() - self._noted_s >= self._seldom_s

    @property
    def is_noted(self) -> bool:
        """Whether nothing is left to note: the last update was noted, or had no collective before it."""
        return self._is_noted

    def note(self, place: int, frame: FrameType | None) -> Update:
        """Returns what is noted of the last update, made by the code at ``frame``; None: that code is left."""
        self._noted_s, self._is_noted = self._now(), True
        return Update(
            collectives=self._collectives,
            updates=self._updates,
            idle=self._idle,
            counters=self._counters.read(frame),
            place=place,
        )

    def name_of(self, counter: int | None) -> str:
        """Returns the name of a counter; an empty one for what is none."""
        return self._counters.names.get(counter or 0, "")
