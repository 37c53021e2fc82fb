"""The variables of the user's loop that count its steps, found by looking: whole numbers that go up with every update.

A loop that leaves out a step calls nothing of ours in it. What is left of the step is its number, in a variable such as
``step`` of ``for step in range(100)``. A look takes the whole numbers among the variables of the user's functions that
are being called, and the attributes of ``self``; once they are known, only those that count. It costs some
microseconds an update.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

from paceline.comm.ledger.call_sites import USER, kind_of_file

_MOST_FRAMES = 6
_LEARNS = 16  # looks at everything
_AGAIN = 32  # and again every so many
_RISES = 2  # until a variable counts
_LARGEST = 2**62
MOST_COUNTERS = 6


class LoopCounters:
    """Finds and reads the counters of one rank's loop."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # of what counts, by number: the same number on every rank
        self._places: dict[int, list[tuple[int, str]]] = defaultdict(list)  # by code: number and name
        self._seen: dict[int, tuple[int, int]] = {}  # last value, and how often it went up in a row
        self._is_users: dict[int, bool] = {}
        self._codes: list[CodeType] = []  # kept, so that no other code gets their addresses
        self._num_looks = 0

    def read(self, frame: FrameType | None) -> dict[int, int]:
        """Returns the counters in the functions that are being called, from ``frame`` outwards, by number."""
        self._num_looks += 1
        is_full = self._num_looks <= _LEARNS or self._num_looks % _AGAIN == 0
        found: dict[int, int] = {}
        num_frames = 0
        while frame is not None and num_frames < _MOST_FRAMES:
            if self._is_user_code(frame.f_code):
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
        """Notes which whole numbers have gone up since the last look."""
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

    def _is_user_code(self, code: CodeType) -> bool:
        found = self._is_users.get(id(code))
        if found is None:
            found = self._is_users[id(code)] = kind_of_file(code.co_filename) == USER
            self._codes.append(code)
        return found


def _value(values: Mapping[str, Any], name: str) -> int | None:
    """Returns a variable or an attribute of ``self``, if it is a whole number that a record holds."""
    owner, _, attribute = name.rpartition(".")
    value = values.get(name) if not owner else getattr(values.get("self"), "__dict__", {}).get(attribute)
    return value if type(value) is int and 0 <= value < _LARGEST else None
