"""How far each rank has come, for whoever outlives it: two numbers in a file that is mapped into memory.

Writing costs less than a microsecond, and what was written is there also after SIGKILL, where records that a rank had
not flushed are lost.

    logs/rank-<r>.step      first step of the attempt, last step trained; little-endian, 8 bytes each
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_STEPS = struct.Struct("<qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The step that an attempt began with, and the last that it trained."""

    first_step: int
    last_step: int


class StepNote:
    """A rank's note of its own progress."""

    def __init__(self, folder: Path, rank: int, first_step: int) -> None:
        path = _path(folder, rank)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, _STEPS.pack(first_step, first_step), 0)  # a full disk is found here, not in a mapping
            self._memory = mmap.mmap(descriptor, _STEPS.size)
        finally:
            os.close(descriptor)
        self._first_step = first_step

    def write(self, step: int) -> None:
        """Notes that a step was trained."""
        _STEPS.pack_into(self._memory, 0, self._first_step, step)


def read_progress(folder: Path) -> dict[int, Progress]:
    """Returns the progress of each rank that noted any, by rank."""
    found = {}
    for path in sorted((folder / "logs").glob("rank-*.step")):
        content = path.read_bytes()
        if len(content) == _STEPS.size:
            first, last = _STEPS.unpack(content)
            found[int(path.stem.removeprefix("rank-"))] = Progress(first_step=first, last_step=last)
    return found


def forget_progress(folder: Path) -> None:
    """Removes the notes of an earlier attempt."""
    for path in (folder / "logs").glob("rank-*.step"):
        path.unlink(missing_ok=True)


def _path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank-{rank}.step"
