"""Pipeline schedules: which rank runs which stage on which microbatch, and when.

p ranks hold the stages of a model, m microbatches pass through them; with equal stages a forward takes 1 and a backward
2 (its two parts 1 each). A rank is idle while the pipeline fills and drains.

    schedule      stages   idle time over work    in flight on a rank, at most
    gpipe         p        (p-1) / m              m microbatches
    1f1b          p        (p-1) / m              p - rank
    interleaved   v p      (p-1) / (v m)          ((v+1) p - 2 rank - 1) / v, where p divides m
    zb-h1         p        (p-1) / (3 m)          p
    zb-v          2 p      (p-1) / (6 m)          p

gpipe and 1f1b for any m, the others for m >= p (zb-v: 1.5 p); with fewer microbatches those fill and drain longer. A
schedule is a pure function of these numbers; ``schedule_measure`` says what it comes to with the costs of real stages.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Action, Schedule, align, parse_action
from paceline.schedule.lowering import lower
from paceline.schedule.measure import ScheduleCosts, ScheduleMeasure, StageCost, equal_costs, measure_schedule
from paceline.schedule.text import draw, format_csv, parse_csv, read_csv, render_text, write_csv
from paceline.schedule.zero_bubble import zb_h1, zb_v

__all__ = [
    "Action",
    "Schedule",
    "SCHEDULE_NAMES",
    "make_schedule",
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "check_schedule",
    "lower",
    "ScheduleCosts",
    "ScheduleMeasure",
    "StageCost",
    "equal_costs",
    "measure_schedule",
    "parse_action",
    "read_csv",
    "write_csv",
    "parse_csv",
    "format_csv",
    "render_text",
    "draw",
]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule of all forwards, then all backwards: the simplest, and every microbatch is in flight at once."""
    orders = [
        [Action("F", rank, m) for m in range(microbatches)] + [Action("B", rank, m) for m in range(microbatches)]
        for rank in range(ranks)
    ]
    return align("gpipe", orders, range(ranks), microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule that runs a backward as soon as it can, so that few microbatches are in flight."""
    orders = []
    for rank in range(ranks):
        forwards = [Action("F", rank, m) for m in range(microbatches)]
        backwards = [Action("B", rank, m) for m in range(microbatches)]
        orders.append(_alternate(forwards, backwards, warm_up=ranks - 1 - rank))
    return align("1f1b", orders, range(ranks), microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Makes a 1f1b schedule in which each rank holds several chunks of the model, so that the pipeline fills faster.

    Stage s is on rank s mod p. Microbatches go through the chunks in groups of p or a few more: a group is through
    one chunk of all ranks just when the first rank is ready to take it through the next. Fewer microbatches than ranks,
    and numbers that p does not divide, make groups of about equal size.
    """
    groups = _groups(microbatches, max(1, microbatches // ranks))
    orders = []
    for rank in range(ranks):
        here = [chunk * ranks + rank for chunk in range(chunks)]
        forwards = [Action("F", stage, m) for group in groups for stage in here for m in group]
        backwards = [Action("B", stage, m) for group in groups for stage in reversed(here) for m in group]
        warm_up = (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank)
        orders.append(_alternate(forwards, backwards, warm_up))
    return align("interleaved", orders, [stage % ranks for stage in range(ranks * chunks)], microbatches)


def _groups(microbatches: int, num_groups: int) -> list[range]:
    """Cuts the microbatches into groups of equal size, the first ones larger by one where that does not go."""
    size, larger = divmod(microbatches, num_groups)
    starts = [index * size + min(index, larger) for index in range(num_groups + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Returns some forwards first, then one of each in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownSchedule:
    """A schedule by name: how it is made, and how many chunks of the model a rank may hold."""

    make: Callable[[int, int, int], Schedule]
    chunks: int  # what it takes when nothing is said
    most_chunks: int | None


_SCHEDULES = {
    "gpipe": _KnownSchedule(make=lambda p, m, _: gpipe(p, m), chunks=1, most_chunks=1),
    "1f1b": _KnownSchedule(make=lambda p, m, _: one_f_one_b(p, m), chunks=1, most_chunks=1),
    "interleaved": _KnownSchedule(make=interleaved, chunks=2, most_chunks=None),
    "zb-h1": _KnownSchedule(make=lambda p, m, _: zb_h1(p, m), chunks=1, most_chunks=1),
    "zb-v": _KnownSchedule(make=lambda p, m, _: zb_v(p, m), chunks=2, most_chunks=2),
}


SCHEDULE_NAMES = tuple(_SCHEDULES)
# The fewest and the most stages of a rank, by schedule; None: as many as one likes.
CHUNKS = {name: (entry.chunks, entry.most_chunks) for name, entry in _SCHEDULES.items()}


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Returns the schedule of that name; each rank holds ``chunks`` stages (None: 2 where it takes several, or 1).

    Raises UsageError for a name that is not known, or numbers that the schedule cannot do.
    """
    if name not in _SCHEDULES:
        near = difflib.get_close_matches(name, _SCHEDULES, n=1, cutoff=0.4)
        hint = f"\n  did you mean {near[0]}?" if near else ""
        raise UsageError(f"there is no schedule {name!r}\n  known are {', '.join(_SCHEDULES)}{hint}")
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        if number < 1:
            raise UsageError(f"schedule {name!r} with {what} = {number}\n  there must be at least one")
    entry = _SCHEDULES[name]
    chunks = entry.chunks if chunks is None else chunks
    if chunks < entry.chunks or (entry.most_chunks is not None and chunks > entry.most_chunks):
        rule = f"exactly {entry.chunks}" if entry.chunks == entry.most_chunks else f"at least {entry.chunks}"
        raise UsageError(
            f"schedule {name!r} with chunks = {chunks}\n  it takes {rule} a rank\n"
            "  for several chunks take interleaved (2 or more) or zb-v (2), for one any other"
        )
    return entry.make(ranks, microbatches, chunks)
