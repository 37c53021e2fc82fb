"""How much of a run's time became training that counts, and what restarts cost.

    useful    the steps that the final state is made of
    repeated  steps that were made again, because a restart or a roll-back went back to a checkpoint
    down      from the last record of an attempt that failed to the start of the first step of the next one
    goodput   useful / duration of the run

A run that ended or was stopped, and was continued later, lost nothing in between: that time does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Any

from paceline.records.summary import RankAttempt, final_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time of a run went, as its lowest rank saw it. ``evaluation_s`` is part of what is not useful."""

    wall_s: float
    useful_s: float
    repeated_s: float
    down_s: float
    evaluation_s: float
    restarts: int
    roll_backs: int
    repeated_steps: int
    skipped_steps: int

    @property
    def share(self) -> float:
        """The share of the run's duration that became steps that count."""
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def lost_share(self) -> float:
        """The share that faults cost: of the time in steps and between a failure and the next step."""
        total = self.useful_s + self.repeated_s + self.down_s
        return (self.repeated_s + self.down_s) / total if total > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, with the shares."""
        return asdict(self) | {"share": self.share, "lost_share": self.lost_share}


def find_goodput(attempts: Sequence[RankAttempt]) -> Goodput:
    """Adds up the attempts of one rank, in their order."""
    made = [record for attempt in attempts for record in attempt.steps]
    kept = final_steps(attempts)
    useful_s = sum(record.step_s for record in kept.values())
    failures = [(before, after) for before, after in pairwise(attempts) if _has_failed(before)]
    events = list(chain.from_iterable(attempt.events for attempt in attempts))
    return Goodput(
        wall_s=sum(_length(attempt) for attempt in attempts)
        + sum(max(0.0, after.run.time - _last_time(before)) for before, after in failures),
        useful_s=useful_s,
        repeated_s=max(0.0, sum(record.step_s for record in made) - useful_s),
        down_s=sum(max(0.0, _first_start(after) - _last_step_end(before)) for before, after in failures),
        evaluation_s=sum(record.seconds for attempt in attempts for record in attempt.evaluations),
        restarts=len(failures),
        roll_backs=sum(event.name == "roll_back" for event in events),
        repeated_steps=len(made) - len(kept),
        skipped_steps=sum(record.is_skipped for record in kept.values()),
    )


def _has_failed(attempt: RankAttempt) -> bool:
    return attempt.end is None or attempt.end.status == "failed"


def _last_time(attempt: RankAttempt) -> float:
    return attempt.records[-1].time if attempt.records else attempt.run.time


def _length(attempt: RankAttempt) -> float:
    return max(0.0, _last_time(attempt) - attempt.run.time)


def _last_step_end(attempt: RankAttempt) -> float:
    """Returns when an attempt last made progress: the end of its last step, else its start."""
    return attempt.steps[-1].time if attempt.steps else attempt.run.time


def _first_start(attempt: RankAttempt) -> float:
    """Returns when an attempt began to train again; where it never did, when it ended."""
    return attempt.steps[0].time - attempt.steps[0].step_s if attempt.steps else _last_time(attempt)
