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
from itertools import pairwise
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
    wall_s, down_s, restarts = sum(max(0.0, each.last_time - each.run.time) for each in attempts), 0.0, 0
    for before, after in pairwise(attempts):
        if before.end is None or before.end.status == "failed":
            restarts += 1
            wall_s += max(0.0, after.run.time - before.last_time)
            progress = before.steps[-1].time if before.steps else before.run.time
            again = after.steps[0].time - after.steps[0].step_s if after.steps else after.last_time
            down_s += max(0.0, again - progress)
    return Goodput(
        wall_s=wall_s,
        useful_s=useful_s,
        repeated_s=max(0.0, sum(record.step_s for record in made) - useful_s),
        down_s=down_s,
        evaluation_s=sum(record.seconds for attempt in attempts for record in attempt.evaluations),
        restarts=restarts,
        roll_backs=sum(event.name == "roll_back" for attempt in attempts for event in attempt.events),
        repeated_steps=len(made) - len(kept),
        skipped_steps=sum(record.is_skipped for record in kept.values()),
    )
