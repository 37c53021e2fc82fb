"""What operations and updates show of the user's code: the lines that called them, and the counters of his loop.

Of an operation, it is the first line outside communication and torch, ours or the user's. Walking frames takes time, so
that the walk ends there. Where it ends in an engine, the user's line above it is looked for once, and reported as the
one from which this place was first reached. In a loop of the user's own, several lines may reach the same place of an
engine: there the walk goes on to the user's line every time.

A loop that leaves out a step calls nothing of ours in it. What is left of the step is its number, in a variable such as
``step`` of ``for step in range(100)``: a whole number that goes up with every update.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from paceline.comm.ledger.file import MOST_COUNTERS

_PACKAGE = Path(__file__).parents[2]
_OUR_COMM = f"{_PACKAGE / 'comm'}{os.sep}"
_OURS = f"{_PACKAGE}{os.sep}"
_FOUND = importlib.util.find_spec("torch")  # found, not imported: that takes seconds
_TORCH = f"{Path(_FOUND.origin).parent}{os.sep}" if _FOUND is not None and _FOUND.origin else "<"
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SCRIPTS = f"{sysconfig.get_path('scripts')}{os.sep}"

PLUMBING, ENGINE, LIBRARY, USER = range(4)


@lru_cache(maxsize=4096)
def kind_of_file(filename: str) -> int:
    """Says whose a file is: the user's, a library's, ours, or plumbing that says nothing about what a rank does."""
    if filename.startswith((_OUR_COMM, _TORCH, "<")):
        return PLUMBING
    if filename.startswith(_OURS):
        return ENGINE
    if f"-packages{os.sep}" in filename:
        return LIBRARY
    return PLUMBING if filename.startswith((_STANDARD_LIBRARY, _SCRIPTS)) else USER


def short_name(filename: str) -> str:
    return f"paceline/{filename.removeprefix(_OURS)}" if filename.startswith(_OURS) else filename


def instruction_of(frame: FrameType) -> int:
    """Returns the address of a frame's instruction, or nearly: no other place has it, as long as its code is kept."""
    return id(frame.f_code) + frame.f_lasti


class CallSites:
    """Numbers call sites; ``add`` gets each new one once, with its number."""

    def __init__(self, add: Callable[[int, str], object]) -> None:
        self._add = add
        self._numbers: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []  # kept, so that no other code gets their addresses
        self._kinds: dict[int, int] = {}
        self._count = 0

    def number(self, frame: FrameType, user: int = 0) -> int:
        """Returns the number of a frame's line; 0: plumbing. ``user`` is an instruction above that tells it apart."""
        number, code = self._numbers.get((instruction_of(frame), user)), frame.f_code
        if number is None:
            number = 0
            if kind_of_file(code.co_filename) != PLUMBING:
                self._count = number = self._count + 1
                self._add(number, name_site(frame))
            self._codes.append(code)
            self._numbers[instruction_of(frame), user] = number
        return number

    def user_instruction(self, frame: FrameType | None) -> int:
        """Returns where the innermost frame of the user's code is, from ``frame`` outwards; 0 where there is none."""
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = kinds[id(code)] = kind_of_file(code.co_filename)
                self._codes.append(code)
            if kind == USER:
                return id(code) + frame.f_lasti
            frame = frame.f_back
        return 0


def name_site(frame: FrameType) -> str:
    """Returns the line at which a frame is; of one in an engine, behind the user's line from which it was reached."""
    user = user_line(frame) if kind_of_file(frame.f_code.co_filename) == ENGINE else ""
    return f"{user} through {_describe(frame)}" if user else _describe(frame)


def user_line(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's code, from ``frame`` outwards; empty where there is none."""
    while frame is not None and kind_of_file(frame.f_code.co_filename) != USER:
        frame = frame.f_back
    return "" if frame is None else _describe(frame)


def _describe(frame: FrameType) -> str:
    return f"{short_name(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


_MOST_FRAMES = 6
_LEARNS = 16  # looks at everything
_AGAIN = 32  # and again every so many
_RISES = 2  # until a variable counts
_LARGEST = 2**62


class LoopCounters:
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
