"""What the clocks of a simulated run come to: where the time of its steps went.

For N ranks, over all steps (evaluations and set-up are left out):

    step        the longest of the ranks, median over the steps
    exposed     what ranks waited for others and for the network
    hidden      the share of the time of operations in which their rank computed, in steps whose spans it has kept
    efficiency  compute of all ranks / (N x time of the steps): 1 where nobody ever waits
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from paceline.comm.virtual.clock import VirtualClock
from paceline.records.records import EndRecord, EvalRecord, Record, StepRecord
from paceline.records.summary import FINAL_STEPS, StepTable, Totals, add_up
from paceline.rehearse.simulate.recording import StepBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRankTimes:
    """Seconds of one rank's steps together, and how much of its communication it did not wait for."""

    rank: int
    compute_s: float
    exposed_s: float
    hidden_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSummary:
    """The clocks of a run in numbers."""

    ranks: int
    steps: int
    seconds: float
    step_s: float
    samples_per_s: float
    exposed_share: float
    efficiency: float
    final_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    by_rank: tuple[SimulatedRankTimes, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize_clocks(
    records: Sequence[Sequence[Record]], clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]
) -> SimulationSummary:
    """Adds up what the ranks recorded."""
    by_rank = [[each for each in own if isinstance(each, StepRecord)] for own in records]
    table = StepTable(dict(enumerate(row)) for row in zip(*by_rank, strict=True))
    totals = add_up(chain.from_iterable(by_rank))
    evaluations = [each for each in records[0] if isinstance(each, EvalRecord)]
    return SimulationSummary(
        ranks=len(records),
        steps=len(table),
        seconds=max(each.seconds for own in records for each in own if isinstance(each, EndRecord)),
        step_s=table.step_s or 0.0,
        samples_per_s=table.samples_per_s or 0.0,
        exposed_share=totals.comm_share,
        efficiency=totals.efficiency(len(records), table.took_s),
        final_loss=table.last(FINAL_STEPS).totals().loss,
        test_loss=evaluations[-1].loss if evaluations else None,
        test_accuracy=evaluations[-1].accuracy if evaluations else None,
        by_rank=tuple(
            _rank_times(rank, add_up(own), clock, bounds)
            for rank, (own, clock, bounds) in enumerate(zip(by_rank, clocks, steps, strict=True))
        ),
    )


def _rank_times(rank: int, totals: Totals, clock: VirtualClock, steps: Sequence[StepBounds]) -> SimulatedRankTimes:
    inside = _merge((max(b.start_s, 0.0), b.end_s) for b in steps)
    ways = _meet(_merge((s.start_s, s.end_s) for s in clock.spans if s.row == "communication"), inside)
    busy = _meet(_merge((s.start_s, s.end_s) for s in clock.spans if s.row == "compute"), inside)
    on_the_way_s = _length(ways)
    return SimulatedRankTimes(
        rank=rank,
        compute_s=totals.compute_s,
        exposed_s=totals.comm_s,
        hidden_share=_length(_meet(ways, busy)) / on_the_way_s if on_the_way_s else 0.0,
    )


_Interval = tuple[float, float]


def _merge(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Returns intervals in order, those that touch made one."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _meet(first: Sequence[_Interval], second: Sequence[_Interval]) -> list[_Interval]:
    """Returns what two lists of merged intervals have in common."""
    found, one, two = [], 0, 0
    while one < len(first) and two < len(second):
        start, end = max(first[one][0], second[two][0]), min(first[one][1], second[two][1])
        if start < end:
            found.append((start, end))
        if first[one][1] <= second[two][1]:
            one += 1
        else:
            two += 1
    return found


def _length(intervals: Sequence[_Interval]) -> float:
    return sum(end - start for start, end in intervals)
