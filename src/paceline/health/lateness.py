"""Who is late while a run goes on, and where it loses the time: ranks are compared over windows of steps.

    who      the last to arrive at the collectives of a step, by clocks that are corrected for their offsets
    where    the phase in which its own time (step less exposed communication) is most above the others' median
    how much its own time a step less the others' median

Both must agree, as neither is enough: a stage of a pipeline arrives late because others were before it, and a rank
that takes long somewhere may keep nobody waiting. Ranks that take turns in one process arrive in the order of their
turns, so that only their own time is compared. The monitor reports a rank that is late in several windows in a row,
once for each phase.

Everything here reads what ranks have written for other reasons; none of them waits for it. A look costs some
microseconds an entry of a ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.health.ledger_view import LedgerView
from paceline.health.straggler import Straggler, StragglerPolicy, last_arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """What a rank's steps have taken in all, and in each phase without the time that it waited for others."""

    steps: int = 0
    step_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)

    def since(self, earlier: PhaseTimes) -> PhaseTimes:
        """Returns the mean step after ``earlier``; ``steps`` says how many there were."""
        steps = self.steps - earlier.steps
        return PhaseTimes(
            steps=steps,
            step_s=(self.step_s - earlier.step_s) / max(1, steps),
            phases={name: (s - earlier.phases.get(name, 0.0)) / max(1, steps) for name, s in self.phases.items()},
        )

    @property
    def own_s(self) -> float:
        """The time of a rank's own work."""
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One rank at one look. ``ahead_s`` is how far its clock is ahead; if it is None, arrivals are not compared."""

    view: LedgerView
    times: PhaseTimes
    ahead_s: float | None = 0.0


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
        self._in_a_row: list[Straggler] = []
        self._told: set[tuple[int, str]] = set()

    def look(self, ranks: Sequence[RankLook]) -> Straggler | None:
        """Takes one look at all ranks; returns a rank that is late and was not reported before."""
        times = {look.view.rank: look.times for look in ranks}
        if self._start.keys() != times.keys():
            self._begin(times)
            return None
        self._note_arrivals(ranks)
        if min(each.steps - self._start[rank].steps for rank, each in times.items()) < self._policy.min_steps:
            return None
        found = self._compare({rank: each.since(self._start[rank]) for rank, each in times.items()})
        self._begin(times)
        return self._consider(found)

    def _begin(self, times: Mapping[int, PhaseTimes]) -> None:
        self._start = dict(times)
        self._last_of_step = {}

    def _note_arrivals(self, ranks: Sequence[RankLook]) -> None:
        processes = [(look.view.host, look.view.pid) for look in ranks]
        offsets = {look.view.rank: look.ahead_s for look in ranks if look.ahead_s is not None}
        if len(set(processes)) < len(processes) or len(offsets) < len(ranks):
            return
        for each in last_arrivals([look.view for look in ranks], offsets):
            before = self._last_of_step.get(each.step, (0.0, -1))
            self._last_of_step[each.step] = max(before, (each.late_s, each.rank))

    def _compare(self, ranks: Mapping[int, PhaseTimes]) -> Straggler | None:
        """Names who is late in a window, if anybody is."""
        if len(ranks) < 2:
            return None
        rule = self._policy
        last = Counter(rank for _, rank in self._last_of_step.values())
        num_seen = len(self._last_of_step)
        steps = min(times.steps for times in ranks.values())
        if num_seen:
            rank, num_last = last.most_common(1)[0]
        else:
            rank = max(ranks, key=lambda each: (ranks[each].own_s, -each))
            num_last = num_seen = steps
        others = [times for other, times in ranks.items() if other != rank]
        lost_s = ranks[rank].own_s - median(times.own_s for times in others)
        step_s = max(times.step_s for times in ranks.values())
        if num_last < rule.min_share * num_seen or step_s <= 0 or lost_s < rule.min_loss * step_s:
            return None
        excess = {
            phase: seconds - median(times.phases.get(phase, 0.0) for times in others)
            for phase, seconds in ranks[rank].phases.items()
        }
        return Straggler(
            rank=rank,
            phase=max(excess, key=lambda phase: excess[phase]),
            lost_s=lost_s,
            loss=lost_s / step_s,
            steps_last=num_last,
            steps=num_seen,
        )

    def _consider(self, found: Straggler | None) -> Straggler | None:
        """Returns the newest of a row of windows that name the same rank and phase, the first time that it is full."""
        key = None if found is None else (found.rank, found.phase)
        if not self._in_a_row or (self._in_a_row[-1].rank, self._in_a_row[-1].phase) != key:
            self._in_a_row = []
        if found is None or key is None:
            return None
        self._in_a_row.append(found)
        if len(self._in_a_row) < self._policy.windows or key in self._told:
            return None
        self._told.add(key)
        return found
