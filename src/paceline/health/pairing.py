"""Do ranks that meet in the same collectives do so in the same step? A pure comparison of two ranks.

A rank that leaves out a step of its loop, only its backward pass or only its update goes on: its next collectives match
those of the others in kind and shape, and ranks mix gradients of different steps. So each rank notes, with updates,

    collectives   how many it had issued in the group of all ranks: the same number is the same moment for all ranks
    updates       how many updates it had made
    counters      the variables of its loop that count steps

At the same moment ranks have made equally many updates. They also agree on a counter that has agreed before and went up
by the same number with every update. Where one rank's counter has gone up by one or more of these too many, it has left
out a step, unless another counter still agrees. Counters that start over, stand still or were never the same say
nothing, so that uneven epochs are no difference. Ranks of other hosts compare an ``UpdateHistory`` each.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Literal

from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry
from paceline.health.verdict import HangVerdict

_TRUSTED = 3  # comparisons in which a counter went up by the same number
_NUM_FIRST = 8  # updates that a history keeps from the beginning
_NUM_LAST = 4  # and of each level
_NUM_LEVELS = 8
_LEVEL_BITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An update after the collective at ``place`` of the ledger; ``idle`` of them came before, after no collective."""

    collectives: int
    updates: int
    idle: int = 0
    counters: Mapping[int, int] = field(default_factory=dict)
    place: int = field(default=0, compare=False)


PlacedUpdate = tuple[Update, LedgerEntry | None]
"""An update, and the collective before it."""


class UpdateHistory:
    """Some updates of a rank, such that two ranks have kept some of the same whenever they compare.

    It keeps the first ones, and on level n the last four of the first ones after a multiple of ``8 ** n`` collectives.
    """

    def __init__(self) -> None:
        self._first: list[Update] = []
        self._levels: tuple[deque[Update], ...] = tuple(deque(maxlen=_NUM_LAST) for _ in range(_NUM_LEVELS))
        self._last = -1

    def add(self, update: Update) -> None:
        """Adds an update. Costs a microsecond."""
        if len(self._first) < _NUM_FIRST:
            self._first.append(update)
        before, self._last = self._last, update.collectives
        for level, kept in enumerate(self._levels):
            if update.collectives >> level * _LEVEL_BITS == before >> level * _LEVEL_BITS:
                break
            kept.append(update)

    def updates(self) -> list[Update]:
        """Returns what it has kept, oldest first; also from another thread than the one that adds."""
        kept = chain(list(self._first), *map(list, self._levels))
        return sorted({each.collectives: each for each in kept}.values(), key=lambda each: each.collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """What two ranks differ in; ``is_own``: due to the rank that compares. ``counter``: of a loop, None for updates."""

    what: Literal["step", "backward", "update"]
    is_own: bool
    own: int
    other: int
    counter: int | None = None


@dataclass(slots=True)
class _CallCounter:
    value: int
    updates: int  # those after a collective that were made when it had this value
    rate: tuple[int, int] = (0, 1)  # by how much it went up, in so many updates
    num_same: int = 0

    def is_on(self, value: int, updates: int) -> bool:
        """Says whether a value is where the counter comes to if it goes on as before."""
        return (value - self.value) * self.rate[1] == self.rate[0] * (updates - self.updates)

    def advance(self, value: int, updates: int) -> bool:
        """Takes the next value on which both ranks agree; returns whether it counts steady steps."""
        is_on, rise = self.is_on(value, updates), value - self.value
        self.rate = rise, max(1, updates - self.updates)
        self.value, self.updates = value, updates
        self.num_same = self.num_same + 1 if is_on and rise > 0 else int(rise > 0)
        return self.num_same >= _TRUSTED


@dataclass(slots=True)
class PairedRanks:
    """Compares the updates of this rank with those of another; ``compared``: collectives at the last comparison."""

    compared: int = 0
    _offsets: tuple[int, int] | None = None  # by how many updates they differ from the beginning, and idle ones
    _counters: dict[int, _CallCounter | None] = field(default_factory=dict)  # None: says nothing any more

    def compare(self, own: Update, other: Update) -> StepDifference | None:
        self.compared = own.collectives
        offsets = own.updates - other.updates, own.idle - other.idle
        if self._offsets is None:
            self._offsets = offsets
        more, idle = offsets[0] - self._offsets[0], offsets[1] - self._offsets[1]
        if more == 0:
            return self._compare_counters(own, other)
        # Whoever made more updates made one for which nothing was reduced, or else the other left one out.
        is_idle = idle * more > 0
        what: Literal["backward", "update"] = "backward" if is_idle else "update"
        return StepDifference(what=what, is_own=(more > 0) == is_idle, own=own.updates, other=other.updates)

    def _compare_counters(self, own: Update, other: Update) -> StepDifference | None:
        suspect: StepDifference | None = None
        agrees, updates = False, own.updates - own.idle
        for number in own.counters.keys() & other.counters.keys():
            value, theirs = own.counters[number], other.counters[number]
            known = self._counters.setdefault(number, _CallCounter(value, updates) if value == theirs else None)
            if known is None:
                continue
            if value == theirs:
                agrees |= known.advance(value, updates)
                continue
            self._counters[number] = None
            least, most = sorted((value, theirs))
            is_trusted = known.num_same >= _TRUSTED and known.is_on(least, updates)
            if is_trusted and (most - least) * known.rate[1] % known.rate[0] == 0:
                suspect = StepDifference(what="step", is_own=value > theirs, own=value, other=theirs, counter=number)
        return None if agrees else suspect


def pairing_verdict(
    difference: StepDifference,
    ranks: tuple[int, int],
    entries: tuple[LedgerEntry | None, LedgerEntry | None],
    name: str,
) -> HangVerdict:
    """Tells a difference between this rank and another; ``entries`` are the collective that both were in."""
    guilty = ranks[0] if difference.is_own else ranks[1]
    deeds = {"step": "left out a step of its loop", "backward": "made an update without a backward pass"}
    what = deeds.get(difference.what, "left out an update")
    prefix = "update " if difference.counter is None else f"{name} = "
    counted = f"{prefix}{difference.own}", f"{prefix}{difference.other}"
    parts = [
        f"rank {rank} at {number}{'' if entry is None else f', {entry.call} at {entry.line}'}"
        for rank, number, entry in sorted(zip(ranks, counted, entries, strict=True), key=lambda part: part[0])
    ]
    entry = entries[0]
    where = "" if entry is None else f" (operation {entry.sequence} of group {entry.group})"
    sentence = f"rank {guilty} {what}, and ranks pair different steps from there on{where}: {'; '.join(parts)}"
    group, sequence = ((), None) if entry is None else (entry.group.ranks, entry.sequence)
    return HangVerdict(kind="mismatch", ranks=(guilty,), sentence=sentence, group=group, sequence=sequence)


def updates_to_text(updates: Sequence[PlacedUpdate]) -> str:
    """Turns updates into text; the lines and calls of the collectives before them come once each."""
    places: dict[str, int] = {}
    rows = []
    for update, entry in updates:
        place = "" if entry is None else json.dumps([asdict(entry.call), entry.site])
        counters = list(update.counters.items())
        rows.append([update.collectives, update.updates, update.idle, counters, places.setdefault(place, len(places))])
    return json.dumps([list(places), rows])


def updates_from_text(text: str, group: GroupName) -> list[PlacedUpdate]:
    """Reads what ``updates_to_text`` wrote; ``group`` is that of all ranks. Raises ValueError for other texts."""
    found: list[PlacedUpdate] = []
    try:
        places, rows = json.loads(text)
        calls = [json.loads(place) if place else None for place in places]
        for collectives, updates, idle, counters, place in rows:
            update = Update(collectives=collectives, updates=updates, idle=idle, counters=dict(counters))
            entry = None
            if calls[place] is not None:
                call, site = calls[place]
                asked = LedgerCall(**call | {"shape": tuple(call["shape"])})
                entry = LedgerEntry(number=0, group=group, sequence=collectives - 1, call=asked, site=site)
            found.append((update, entry))
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"no updates of ranks: {error}") from error
    return found
