"""Which rank the others wait for, step after step, and in which phase it loses the time.

All ranks leave a step's last collective together, so that who arrives last at the next ones is who had the most of
its own to do. A step's record has that without any clock that two hosts would have to agree on:

    own time of a rank   step - exposed communication  =  data + forward + backward + update
    lost in a step       own time of the rank - median own time of the others
    phase                the one in which the rank's excess over the others' median is largest

and nothing was synchronised to get it. A rank is a straggler if it was the last in most of the steps, and others lost a
good part of the step by it (see ``StragglerPolicy``).

Where the ledgers of ranks share a clock, ``last_arrivals`` names the last at each single operation; ``lateness.py``
uses it while the run goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

from paceline.health.ledger_view import BACKWARD, DATA, FORWARD, OPTIMIZER, GroupName, LedgerEntry, LedgerView
from paceline.units import format_seconds


class TimedStep(Protocol):
    """The seconds of one rank's step and of its phases, as a step record has them."""

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float


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
        """Returns plain values, with the sentence."""
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
    warm = [ranks for ranks in steps[max(1, len(steps) // 10) :] if len(ranks) > 1]
    if len(warm) < rule.min_steps:
        return None
    lost: dict[int, list[float]] = defaultdict(list)
    for ranks in warm:
        own = {rank: sum(_phases(record).values()) for rank, record in ranks.items()}
        last = max(own, key=lambda rank: (own[rank], -rank))
        lost[last].append(own[last] - median(seconds for rank, seconds in own.items() if rank != last))
    rank = max(lost, key=lambda each: (len(lost[each]), -each))
    lost_s = median(lost[rank])
    step_s = median(max(record.step_s for record in ranks.values()) for ranks in warm)
    if len(lost[rank]) < rule.min_share * len(warm) or step_s <= 0 or lost_s < rule.min_loss * step_s:
        return None
    return Straggler(
        rank=rank,
        phase=_slow_phase(rank, warm),
        lost_s=lost_s,
        loss=lost_s / step_s,
        steps_last=len(lost[rank]),
        steps=len(warm),
    )


def _phases(record: TimedStep) -> dict[str, float]:
    seconds = (record.data_s, record.forward_s, record.backward_s, record.optimizer_s)
    return dict(zip((DATA, FORWARD, BACKWARD, OPTIMIZER), seconds, strict=True))


def _slow_phase(rank: int, steps: Sequence[Mapping[int, TimedStep]]) -> str:
    """Returns the phase in which a rank takes most more than the others, in the median step."""
    excess: dict[str, list[float]] = defaultdict(list)
    for ranks in steps:
        if rank not in ranks:
            continue
        others = [_phases(record) for other, record in ranks.items() if other != rank]
        for phase, seconds in _phases(ranks[rank]).items():
            excess[phase].append(seconds - median(each[phase] for each in others))
    return max(excess, key=lambda phase: median(excess[phase]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LastArrival:
    """Who came last to an operation, how long after the median of the others, and in which phase it was."""

    sequence: int
    rank: int
    late_s: float
    phase: str
    step: int = 0


def last_arrivals(ledgers: Sequence[LedgerView], offsets: Mapping[int, float] | None = None) -> list[LastArrival]:
    """Names the last at each collective that all of its group have come to, as far as the ledgers go back.

    ``offsets`` are what each rank's clock is ahead by; none: they read one clock, as ranks of a host do.
    """
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
