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
from statistics import median
from typing import Any

from paceline.comm.virtual.clock import VirtualClock
from paceline.records.records import EndRecord, EvalRecord, Record, StepRecord
from paceline.rehearse.simulate.recording import StepBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
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
    by_rank: tuple[RankTimes, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as plain data."""
        return asdict(self)


def summarize_clocks(
    records: Sequence[Sequence[Record]], clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]
) -> SimulationSummary:
    """Adds up what the ranks recorded."""
    by_rank = [[each for each in own if isinstance(each, StepRecord)] for own in records]
    rounds = list(zip(*by_rank, strict=True))
    lengths = [max(record.step_s for record in each) for each in rounds]
    total_s = sum(record.step_s for own in by_rank for record in own)
    waited_s = sum(record.comm_s for own in by_rank for record in own)
    samples = [sum(record.samples for record in each) for each in rounds]
    evaluations = [each for each in records[0] if isinstance(each, EvalRecord)]
    last = rounds[-5:]
    count = sum(record.count for each in last for record in each)
    return SimulationSummary(
        ranks=len(records),
        steps=len(rounds),
        seconds=max(each.seconds for own in records for each in own if isinstance(each, EndRecord)),
        step_s=median(lengths) if lengths else 0.0,
        samples_per_s=median(n / s for n, s in zip(samples, lengths, strict=True) if s > 0) if any(lengths) else 0.0,
        exposed_share=waited_s / total_s if total_s else 0.0,
        efficiency=(total_s - waited_s) / (len(records) * sum(lengths)) if any(lengths) else 0.0,
        final_loss=sum(record.loss_sum for each in last for record in each) / count if count else None,
        test_loss=evaluations[-1].loss if evaluations else None,
        test_accuracy=evaluations[-1].accuracy if evaluations else None,
        by_rank=tuple(
            _rank_times(rank, own, clock, bounds)
            for rank, (own, clock, bounds) in enumerate(zip(by_rank, clocks, steps, strict=True))
        ),
    )


def _rank_times(
    rank: int, records: Sequence[StepRecord], clock: VirtualClock, steps: Sequence[StepBounds]
) -> RankTimes:
    exposed_s = sum(record.comm_s for record in records)
    inside = _merge((max(b.start_s, 0.0), b.end_s) for b in steps)
    ways = _meet(_merge((s.start_s, s.end_s) for s in clock.spans if s.row == "communication"), inside)
    busy = _meet(_merge((s.start_s, s.end_s) for s in clock.spans if s.row == "compute"), inside)
    on_the_way_s = _length(ways)
    return RankTimes(
        rank=rank,
        compute_s=sum(record.step_s for record in records) - exposed_s,
        exposed_s=exposed_s,
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
