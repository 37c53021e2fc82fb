"""Which rank the others wait for, step after step, and in which phase it loses the time.

All ranks leave a step's last collective together: who arrives last at the next ones had the most of its own to do. A
step's record has that without any clock that two hosts would have to agree on, and nothing is synchronised to get it:

    own time of a rank   step - exposed communication  =  data + forward + backward + update
    lost in a step       own time of the rank - median own time of the others
    phase                the one in which the rank's excess over the others' median is largest

A rank is a straggler if it was the last in most of the steps, and others lost a good part of the step by it (see
``StragglerPolicy``). ``find_straggler`` looks so at the records of a run.

``Lateness`` compares ranks over windows of steps while the run goes on. Where their ledgers share a clock, or clocks
are corrected for their offsets, ``last_arrivals`` names who arrived last at each collective, and both must agree: a
stage of a pipeline arrives late because others were before it, and a rank that takes long somewhere may keep nobody
waiting. Of ranks that take turns in one process only their own time is compared. The monitor reports a rank that is
late in several windows in a row, once for each phase.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

from paceline.health.ledger_view import OPTIMIZER, STEP_PHASES, GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.units import format_seconds

_COLLECTIVE = LedgerCall(kind="a collective")


class TimedStep(Protocol):
    """The seconds of one rank's step and of its phases, as a step record has them."""

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def steps(self) -> int: ...  # that it is the mean of


_Row = TypeVar("_Row", bound=Mapping[int, TimedStep])


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When a rank is called a straggler.

    It was the last in ``min_share`` of at least ``min_steps`` steps, and in the median step the others waited
    ``min_loss`` of the step for it. The first tenth of the steps is left out, as it pays for start-up.
    """

    min_share: float = 0.75
    min_steps: int = 5
    min_loss: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is consistently late: by ``lost_s`` in the median step, which is ``loss`` of the step."""

    rank: int
    phase: str
    lost_s: float
    loss: float
    steps_last: int
    steps: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": str(self)}

    def __str__(self) -> str:
        phase = "update" if self.phase == OPTIMIZER else self.phase
        return (
            f"rank {self.rank} is the last in {self.steps_last} of {self.steps} steps: the others wait "
            f"{format_seconds(self.lost_s)} for it, {100 * self.loss:.0f} % of a step; it loses the time in {phase}"
        )


def find_straggler(steps: Sequence[Mapping[int, TimedStep]], policy: StragglerPolicy | None = None) -> Straggler | None:
    """Finds the rank that the others wait for in most steps: ``steps`` has the records of each, by rank."""
    rule = policy or StragglerPolicy()
    warm = [ranks for ranks in without_warm_up(steps) if len(ranks) > 1]
    if len(warm) < rule.min_steps:
        return None
    lost: dict[int, list[float]] = defaultdict(list)
    num_last: Counter[int] = Counter()
    for ranks in warm:
        own = {rank: sum(_own_seconds(record)) for rank, record in ranks.items()}
        last = max(own, key=lambda rank: (own[rank], -rank))
        lost[last].append(own[last] - median(seconds for rank, seconds in own.items() if rank != last))
        num_last[last] += steps_of(ranks)
    rank = max(num_last, key=lambda each: (num_last[each], -each))
    step_s = median(max(record.step_s for record in ranks.values()) for ranks in warm)
    excess: dict[str, list[float]] = defaultdict(list)
    for ranks in (each for each in warm if rank in each):
        others = zip(*(_own_seconds(record) for other, record in ranks.items() if other != rank), strict=True)
        for phase, seconds, theirs in zip(STEP_PHASES, _own_seconds(ranks[rank]), others, strict=True):
            excess[phase].append(seconds - median(theirs))
    by_phase = {phase: median(each) for phase, each in excess.items()}
    return _judged(rule, rank, (num_last[rank], num_last.total()), (median(lost[rank]), step_s), by_phase)


def steps_of(row: Mapping[int, TimedStep]) -> int:
    """Returns how many steps a row of records stands for: on all ranks the same."""
    return next((record.steps for record in row.values()), 1)


def without_warm_up(rows: Sequence[_Row]) -> Sequence[_Row]:
    """Leaves out the first tenth of the steps, and at least one."""
    left = sum(map(steps_of, rows)) // 10
    for number, row in enumerate(rows):
        left -= steps_of(row)
        if left <= 0 or number == len(rows) - 1:
            return rows[number + 1 :]
    return rows


def _judged(
    rule: StragglerPolicy, rank: int, last: tuple[int, int], seconds: tuple[float, float], excess: Mapping[str, float]
) -> Straggler | None:
    """Returns a rank that was last in so many of so many steps, and lost so much of a step, if it is a straggler."""
    (num_last, num_steps), (lost_s, step_s) = last, seconds
    if num_last < rule.min_share * num_steps or step_s <= 0 or lost_s < rule.min_loss * step_s:
        return None
    phase, loss = max(excess, key=lambda each: excess[each]), lost_s / step_s
    return Straggler(rank=rank, phase=phase, lost_s=lost_s, loss=loss, steps_last=num_last, steps=num_steps)


def _own_seconds(record: TimedStep) -> tuple[float, float, float, float]:
    """Returns what the rank itself took in each of STEP_PHASES, in their order."""
    return record.data_s, record.forward_s, record.backward_s, record.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LastArrival:
    """Who came last to an operation, how long after the median of the others, and in which phase it was."""

    sequence: int
    rank: int
    late_s: float
    phase: str
    step: int = 0


def last_arrivals(ledgers: Sequence[LedgerView], offsets: Mapping[int, float] | None = None) -> list[LastArrival]:
    """Names the last at each collective that its whole group came to; ``offsets``: how far ahead each clock is."""
    ahead = offsets or {}
    places: dict[tuple[GroupName, int], dict[int, LedgerEntry]] = defaultdict(dict)
    for view in ledgers:
        for entry in view.entries:
            if not entry.call.is_message and len(entry.group.ranks) > 1:
                places[entry.group, entry.sequence][view.rank] = entry
    found = []
    for (group, sequence), entries in places.items():
        if len(entries) == len(group.ranks):
            at = {rank: entry.issued_s - ahead.get(rank, 0.0) for rank, entry in entries.items()}
            last = max(at, key=lambda rank: (at[rank], -rank))
            late_s = at[last] - median(seconds for rank, seconds in at.items() if rank != last)
            phase, step = entries[last].phase, entries[last].step
            found.append(LastArrival(sequence=sequence, rank=last, late_s=late_s, phase=phase, step=step))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """What a rank's steps have taken in all, and in each phase without the time that it waited for others."""

    steps: int = 0
    step_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)

    def since(self, earlier: PhaseTimes) -> PhaseTimes:
        """Returns the mean step after ``earlier``; ``steps`` says how many there were."""
        steps = self.steps - earlier.steps
        phases = {name: (s - earlier.phases.get(name, 0.0)) / max(1, steps) for name, s in self.phases.items()}
        return PhaseTimes(steps=steps, step_s=(self.step_s - earlier.step_s) / max(1, steps), phases=phases)

    @property
    def own_s(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One rank at one look. ``ahead_s`` is how far its clock is ahead; if it is None, arrivals are not compared."""

    view: LedgerView
    times: PhaseTimes
    ahead_s: float | None = 0.0


def looks_to_text(looks: Sequence[RankLook]) -> str:
    """Turns looks into text with what comparing ranks needs: groups once, and the places and times of operations."""
    groups: dict[GroupName, int] = {}
    ranks = []
    for look in looks:
        calls = [each for each in look.view.entries if not each.call.is_message]
        entries = [[groups.setdefault(one.group, len(groups)), one.sequence, one.step, one.issued_s] for one in calls]
        view = look.view
        ranks.append([view.rank, view.host, view.pid, asdict(look.times), look.ahead_s, entries])
    return json.dumps([[[list(group.ranks), group.number] for group in groups], ranks])


def looks_from_text(text: str) -> list[RankLook]:
    named, ranks = json.loads(text)
    groups = [GroupName(tuple(members), number) for members, number in named]
    looks = []
    for rank, host, pid, times, ahead_s, places in ranks:
        entries = tuple(
            LedgerEntry(number=at, group=groups[group], sequence=number, step=step, issued_s=when, call=_COLLECTIVE)
            for at, (group, number, step, when) in enumerate(places, start=1)
        )
        view = LedgerView(rank=rank, host=host, pid=pid, entries=entries)
        looks.append(RankLook(view=view, times=PhaseTimes(**times), ahead_s=ahead_s))
    return looks


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessPolicy(StragglerPolicy):
    """When a rank is reported: late in ``windows`` windows in a row, each of ``min_steps`` steps or more."""

    min_steps: int = 10
    windows: int = 3


class Lateness:
    """Compares ranks from look to look."""

    def __init__(self, policy: LatenessPolicy | None = None) -> None:
        self._policy = policy or LatenessPolicy()
        self._start: dict[int, PhaseTimes] = {}
        self._last_of_step: dict[int, tuple[float, int]] = {}  # how late, and who
        self._in_a_row: tuple[tuple[int, str] | None, int] = (None, 0)  # who and where, and in how many windows
        self._told: set[tuple[int, str]] = set()

    def look(self, ranks: Sequence[RankLook]) -> Straggler | None:
        """Takes one look at all ranks; returns a rank that is late and was not reported before."""
        times = {look.view.rank: look.times for look in ranks}
        if self._start.keys() != times.keys():
            self._start, self._last_of_step = times, {}
            return None
        self._note_arrivals(ranks)
        if min(each.steps - self._start[rank].steps for rank, each in times.items()) < self._policy.min_steps:
            return None
        found = self._compare({rank: each.since(self._start[rank]) for rank, each in times.items()})
        self._start, self._last_of_step = times, {}
        key = None if found is None else (found.rank, found.phase)
        before, number = self._in_a_row
        self._in_a_row = key, number + 1 if key == before else 1
        if key is None or self._in_a_row[1] < self._policy.windows or key in self._told:
            return None
        self._told.add(key)
        return found

    def _note_arrivals(self, ranks: Sequence[RankLook]) -> None:
        processes = [(look.view.host, look.view.pid) for look in ranks]
        offsets = {look.view.rank: look.ahead_s for look in ranks if look.ahead_s is not None}
        if len(set(processes)) < len(processes) or len(offsets) < len(ranks):
            return
        for each in last_arrivals([look.view for look in ranks], offsets):
            before = self._last_of_step.get(each.step, (0.0, -1))
            self._last_of_step[each.step] = max(before, (each.late_s, each.rank))

    def _compare(self, ranks: Mapping[int, PhaseTimes]) -> Straggler | None:
        if len(ranks) < 2:
            return None
        num_seen = len(self._last_of_step)
        if num_seen:
            rank, num_last = Counter(rank for _, rank in self._last_of_step.values()).most_common(1)[0]
        else:
            rank = max(ranks, key=lambda each: (ranks[each].own_s, -each))
            num_last = num_seen = min(times.steps for times in ranks.values())
        others = [times for other, times in ranks.items() if other != rank]
        lost_s = ranks[rank].own_s - median(times.own_s for times in others)
        step_s = max(times.step_s for times in ranks.values())
        excess = {
            phase: seconds - median(times.phases.get(phase, 0.0) for times in others)
            for phase, seconds in ranks[rank].phases.items()
        }
        return _judged(self._policy, rank, (num_last, num_seen), (lost_s, step_s), excess)
