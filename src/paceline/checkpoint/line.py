"""Lines of descent: which checkpoints of a folder a run came along, and which it has gone back from.

    step     4 --- 8 --- 12 --- 16             line 0: ((0, 0),)
                    \\
                     12 --- 16 --- 20          line 1: ((0, 0), (1, 8)): line 0 up to step 8, and from there line 1

A run that goes back to an older checkpoint and saves again takes a new line, with a number above all others of the
folder. The line with the highest number is the current one; its checkpoints, and those that it came along, go before
all others, however high the steps of these are. Pure values; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Line:
    """The turns of a line: the number of each part of it, and the step behind which that begins."""

    turns: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def number(self) -> int:
        """Which line it is; a higher one was begun later."""
        return self.turns[-1][0]

    def has(self, other: Line, step: int) -> bool:
        """Says whether a checkpoint of another line lies on this one, too."""
        length = len(other.turns)
        if self.turns[:length] != other.turns:
            return False
        return length == len(self.turns) or step <= self.turns[length][1]

    def to_json(self) -> list[list[int]]:
        """Returns it as JSON values."""
        return [list(turn) for turn in self.turns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a checkpoint lies: its line and its step."""

    line: Line
    step: int

    @property
    def age(self) -> tuple[int, int]:
        """Sorts checkpoints by when they were written, as far as lines and steps tell."""
        return self.line.number, self.step


def parse_line(value: Any) -> Line:
    """Reads what ``to_json`` gave. Raises CheckpointError for anything else."""
    try:
        turns = tuple((int(number), int(step)) for number, step in value)
        if not turns:
            raise ValueError("no turns")
        return Line(turns)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{value!r} is no line of descent: {error}") from error


def line_from(start: Spot | None, found: Sequence[Spot]) -> Line:
    """Returns the line of a run that starts at a checkpoint, None: at the beginning, where ``found`` are there already.

    It is the checkpoint's own where nothing was written later, and else a new one.
    """
    spot = start or Spot(line=Line(), step=0)
    latest = max((each.age for each in found), default=(0, 0))
    if latest <= spot.age:
        return spot.line
    turn = (latest[0] + 1, spot.step)
    return Line((turn,)) if start is None else Line((*spot.line.turns, turn))


def likely_line(step: int, found: Sequence[Spot]) -> Line:
    """Returns the line of a state of which nothing but its step is known.

    It goes on from the newest checkpoint if it is behind that, and else from the last one before it on its line.
    """
    if not found:
        return Line()
    newest = newest_line(found)
    before = [each for each in found if each.step < step and newest.has(each.line, each.step)]
    return line_from(max(before, key=lambda each: each.age, default=None), found)


def newest_line(found: Iterable[Spot], own: Line | None = None) -> Line:
    """Returns the current line among those of some checkpoints, and the one that a run is on, if it is known."""
    lines = [each.line for each in found]
    if own is not None:
        lines.append(own)
    return max(lines, key=lambda line: line.number, default=Line())
