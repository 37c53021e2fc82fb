"""What holds a run back, from its records alone, and what to change.

For steps after the warm-up, as shares of their time:

    data             the device (or the rank) waited for the next batch
    communication    it waited for other ranks: exposed, nothing hides it
    host             the device had done all that was issued when the host was done issuing the step: it waits for
                     kernels to be launched (GPUs only)

What a run spends less than the threshold on does not limit it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from paceline.records.summary import StepTable

_FEWEST_STEPS = 5  # to judge by
_DATA, _COMMUNICATION, _HOST = 0.05, 0.15, 0.5  # of the step
_FIXES = {
    "data": "waits for the next batch: raise data.workers, or prepare less of each sample in the data set",
    "communication": "waits for other ranks: raise train.accumulate or the global batch, set comm.bucket_mb = auto, or "
    "send less (comm.compression, train.precision); paceline plan compares layouts",
    "host": "waits for the host to launch kernels: compile the model (model.compile), with CUDA graphs where they are "
    "possible, or raise train.microbatch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One thing that limits a run: its share of the step, and what to change."""

    what: Literal["data", "communication", "host"]
    share: float
    fix: str

    def __str__(self) -> str:
        return f"limited by {self.what}: {100 * self.share:.0f} % of the step {self.fix}"


def find_limits(table: StepTable, *, has_straggler: bool = False) -> tuple[Limit, ...]:
    """Returns what limits a run, the largest share first; nothing for runs of a few steps.

    Ranks that wait for a straggler do not wait for communication: that is told of the straggler.
    """
    steps = table.without_warm_up()
    total = steps.mean_s("step_s")
    if len(steps) < _FEWEST_STEPS or total <= 0:
        return ()
    waits = [each.host_s for each in chain.from_iterable(row.values() for row in steps.rows) if each.host_s is not None]
    shares: list[tuple[Literal["data", "communication", "host"], float, float]] = [
        ("data", steps.mean_s("data_s") / total, _DATA),
        ("communication", 0.0 if has_straggler else steps.mean_s("comm_s") / total, _COMMUNICATION),
        ("host", sum(waits) / steps.totals().step_s, _HOST),
    ]
    found = [Limit(what=what, share=share, fix=_FIXES[what]) for what, share, least in shares if share >= least]
    return tuple(sorted(found, key=lambda each: -each.share))
