"""What was measured by size: how to read between two sizes, and what all-reduces took, as a benchmark wrote it down.

Between two sizes that were measured, a figure lies on a straight line of the logarithms. ``auto`` asks a benchmark's
record in place of the formulas.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from paceline.cluster.costs import Algorithm, Placement
from paceline.errors import UsageError
from paceline.untrusted import parse_json, read_regular

Choice: TypeAlias = Literal["native"] | Algorithm
_CHOICES: tuple[Choice, ...] = ("native", *get_args(Algorithm))
_FIX = (
    "  write one on as many ranks and hosts: paceline bench comm --output FILE, python bench/links.py --speed MBIT "
    "--output FILE"
)


def figure_between(points: Sequence[tuple[int, float]], size: float) -> float:
    """Returns the figure of a size; ``points`` are (size, figure) in growing order, beyond which it stays the same."""
    place = bisect_left([each for each, _ in points], size)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (low, first), (high, second) = points[place - 1], points[place]
    share = math.log(size / low) / math.log(high / low)
    return first * math.pow(second / first, share)


def seconds_between(points: Sequence[tuple[int, float]], size: float) -> float:
    """Returns the seconds of a message of some size; ``points`` are (size, seconds) in growing order.

    Below the smallest they stay as they are: there a message pays for getting going. Beyond the largest they grow.
    """
    largest, seconds = points[-1]
    return seconds * size / largest if size > largest else figure_between(points, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """Seconds by bytes, in growing order, of each way to all-reduce; on one placement of ranks."""

    where: Placement
    points: Mapping[Choice, Sequence[tuple[int, float]]]

    def seconds(self, choice: Choice, num_bytes: float) -> float:
        return seconds_between(self.points[choice], num_bytes)

    def fastest(self, num_bytes: float) -> Choice:
        return min(self.points, key=lambda choice: self.seconds(choice, num_bytes))


def read_table(path: Path, where: Placement) -> MeasuredTable:
    """Reads what a benchmark's record says about this placement of ranks.

    Raises UsageError for a file that is no such record, or that says nothing, or two things, about the placement.
    """
    try:
        found = list(_points(parse_json(read_regular(path))["rows"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is no record of all-reduces: {why}\n  a benchmark writes one\n{_FIX}") from error
    here = [(choice, size, seconds) for place, choice, size, seconds in found if place == (where.ranks, where.hosts)]
    named = f"{where.ranks} ranks on {where.hosts} {'host' if where.hosts == 1 else 'hosts'}"
    if not here:
        known = ", ".join(sorted({f"{ranks} on {hosts}" for (ranks, hosts), *_ in found})) or "none"
        raise UsageError(f"{path} has no all-reduces of {named}\n  it has those of ranks on hosts: {known}\n{_FIX}")
    points: dict[Choice, list[tuple[int, float]]] = {}
    for choice, size, seconds in sorted(here, key=lambda each: each[1]):
        points.setdefault(choice, []).append((size, seconds))
    for choice, line in points.items():
        if len({size for size, _ in line}) < len(line):
            raise UsageError(
                f"{path} says more than once how long {choice} takes for one size on {named}\n"
                f"  a table is of one kind of link\n{_FIX}"
            )
    return MeasuredTable(where=where, points=points)


def _points(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[int, int], Choice, int, float]]:
    """Reads rows of ``bench/links.py``; and of ``paceline bench comm`` those over Gloo, on one host."""
    for row in rows:
        if row.get("part") is not None:
            if row["part"] == "all_reduce" and row["arm"] in _CHOICES:
                yield (row["ranks"], row["hosts"]), row["arm"], row["size_bytes"], row["median_ms"] / 1e3
        elif row["backend"] == "gloo" and row["algorithm"] in _CHOICES and row["algorithm"] != "hierarchical":
            yield (row["ranks"], 1), row["algorithm"], row["bytes"], row["median_us"] / 1e6
