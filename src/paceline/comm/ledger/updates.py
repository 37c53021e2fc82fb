"""The updates of optimizers in a loop of the user's own: which of them count, and what is noted of each.

A loop that leaves out a step calls nothing of ours in it. What is left of the step is its number, in a variable such as
``step`` of ``for step in range(100)``: a whole number that goes up with every update. It is looked for among the
variables of the user's functions that are being called, and the attributes of ``self``; once found, only it is read.
"""

from __future__ import annotations

import math
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from paceline.comm.ledger.call_sites import USER, kind_of_file
from paceline.comm.ledger.file import MOST_COUNTERS
from paceline.health.pairing import Update

_MOST_FRAMES = 6
_LEARNS = 16  # looks at everything
_AGAIN = 32  # and again every so many
_RISES = 2  # until a variable counts
_LARGEST = 2**62


class LoopCounters:
    """Finds and reads the counters of one rank's loop."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # of what counts, by number: the same number on every rank
        self._places: dict[int, list[tuple[int, str]]] = defaultdict(list)  # by code: number and name
        self._seen: dict[int, tuple[int, int]] = {}  # last value, and how often it went up in a row
        self._codes: list[CodeType] = []  # kept, so that no other code gets their addresses
        self._num_looks = 0

    def read(self, frame: FrameType | None) -> dict[int, int]:
        """Returns the counters in the functions that are being called, from ``frame`` outwards, by number."""
        self._num_looks += 1
        is_full = self._num_looks <= _LEARNS or self._num_looks % _AGAIN == 0
        found: dict[int, int] = {}
        num_frames = 0
        while frame is not None and num_frames < _MOST_FRAMES:
            if kind_of_file(frame.f_code.co_filename) == USER:
                num_frames += 1
                known = self._places.get(id(frame.f_code))
                if is_full or known:
                    values = frame.f_globals if frame.f_code.co_name == "<module>" else frame.f_locals
                    if is_full:
                        self._learn(frame.f_code, values)
                    for number, name in self._places.get(id(frame.f_code), ()):
                        value = _value(values, name)
                        if value is not None:
                            found[number] = value
            frame = frame.f_back
        return found

    def _learn(self, code: CodeType, values: Mapping[str, Any]) -> None:
        own = getattr(values.get("self"), "__dict__", None) or {}
        names = [name for name, value in values.items() if type(value) is int]
        names += [f"self.{name}" for name, value in own.items() if type(value) is int]
        for name in names:
            value = _value(values, name)
            if value is None:
                continue
            number = zlib.crc32(f"{code.co_qualname}:{name}".encode())
            before, rises = self._seen.get(number, (value, 0))
            rises = rises + 1 if value > before else 0
            self._seen[number] = (value, rises)
            if rises >= _RISES and number not in self.names and len(self.names) < MOST_COUNTERS:
                self.names[number] = name
                self._places[id(code)].append((number, name))
                self._codes.append(code)


def _value(values: Mapping[str, Any], name: str) -> int | None:
    """Returns a variable or an attribute of ``self``, if it is a whole number that a record holds."""
    owner, _, attribute = name.rpartition(".")
    value = values.get(name) if not owner else getattr(values.get("self"), "__dict__", {}).get(attribute)
    return value if type(value) is int and 0 <= value < _LARGEST else None


_NUM_FIRST = 32  # updates that are all noted
_MORE_BITS = 3  # of the number of collectives between notes, beyond those of a step


class TrainedParameters:
    """The parameters of engines, which ranks train together. Those that are gone do not count."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # by identity: tensors do not compare to a truth

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        self._known.update((id(each), weakref.ref(each)) for each in parameters)

    def has_any(self) -> bool:
        return bool(self._known)

    def are_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Says whether an optimizer updates them, by its first parameter."""
        first = next(iter(optimizer.param_groups[0]["params"]), None)
        known = self._known.get(id(first))
        return known is not None and known() is first


class UpdateNotes:
    """Counts the updates of one rank, and makes what is noted of some of them.

    Noting costs a hundred microseconds or more. So a rank notes its first updates, then those that are the first after
    a multiple of a number of collectives, which is between four and eight times that of a step; and whenever the last
    note is ``seldom_s`` seconds old. Ranks that have issued the same collectives note the same updates, but for the
    last rule, and in slow loops by that one too.
    """

    def __init__(self, *, seldom_s: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._counters = LoopCounters()
        self._seldom_s, self._now = seldom_s, now
        self._collectives = self._updates = self._idle = 0
        self._noted_s = -math.inf
        self.is_noted = True  # nothing is left to note: the last update was noted, or had no collective before it

    def count(self, collectives: int) -> bool:
        """Counts an update after so many collectives of all ranks; returns whether it is to be noted."""
        new, before = collectives - self._collectives, self._collectives
        self._collectives = collectives
        self._updates += 1
        self.is_noted = new <= 0
        if self.is_noted:
            self._idle += 1
            return False
        if self._updates <= _NUM_FIRST or (before ^ collectives) >> new.bit_length() + _MORE_BITS:
            return True
        return self._now() - self._noted_s >= self._seldom_s

    def note(self, place: int, frame: FrameType | None) -> Update:
        """Returns what is noted of the last update, made by the code at ``frame``; None: that code is left."""
        self._noted_s, self.is_noted = self._now(), True
        counted = {"collectives": self._collectives, "updates": self._updates, "idle": self._idle}
        return Update(**counted, place=place, counters=self._counters.read(frame))

    def name_of(self, counter: int | None) -> str:
        """Returns the name of a counter; an empty one for what is none."""
        return self._counters.names.get(counter or 0, "")
