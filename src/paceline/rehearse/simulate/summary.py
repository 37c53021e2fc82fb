"""What the clocks of a simulated run come to: where the time of its steps went.

For N ranks, over all steps (evaluations and set-up are left out):

    step        the longest of the ranks, median over the steps
    exposed     what ranks waited for others and for the network
    hidden      the share of the time of operations in which their rank computed, in steps whose spans it has kept
    efficiency  compute of all ranks / (N x time of the steps): 1 where nobody ever waits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from paceline.comm.virtual.clock import VirtualClock
from paceline.notebook import Shown
from paceline.records.records import EndRecord, EvalRecord, Record, StepRecord
from paceline.records.summary import FINAL_STEPS, StepTable, Totals, add_up
from paceline.rehearse.simulate.recording import StepBounds
from paceline.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRankTimes:
    """Seconds of one rank's steps together, and how much of its communication it did not wait for."""

    rank: int
    compute_s: float
    exposed_s: float
    hidden_share: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SimulationSummary(Shown):
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

    def facts(self) -> dict[str, object]:
        return {
            "ranks": self.ranks,
            "steps": self.steps,
            "step": format_seconds(self.step_s),
            "samples/s": self.samples_per_s,
            "efficiency": self.efficiency,
            "loss": self.final_loss,
            "test loss": self.test_loss,
            "test accuracy": self.test_accuracy,
        }


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
    inside = [(max(each.start_s, 0.0), each.end_s) for each in steps]
    ways = [(each.start_s, each.end_s) for each in clock.spans if each.row == "communication"]
    busy = [(each.start_s, each.end_s) for each in clock.spans if each.row == "compute"]
    on_the_way_s = _time_in_all(ways, inside)
    return SimulatedRankTimes(
        rank=rank,
        compute_s=totals.compute_s,
        exposed_s=totals.comm_s,
        hidden_share=_time_in_all(ways, busy, inside) / on_the_way_s if on_the_way_s else 0.0,
    )


def _time_in_all(*kinds: Sequence[tuple[float, float]]) -> float:
    """Returns how long an interval of every kind was under way at once; those of one kind may overlap."""
    edges = [
        (moment, change, kind)
        for kind, intervals in enumerate(kinds)
        for interval in intervals
        for moment, change in zip(interval, (-1, 1), strict=True)  # in order: at one moment, starts before ends
    ]
    under_way, since_s, found = [0] * len(kinds), 0.0, []
    for moment, change, kind in sorted(edges):
        was_in_all = all(under_way)
        under_way[kind] -= change
        if all(under_way) and not was_in_all:
            since_s = moment
        elif was_in_all and not all(under_way):
            found.append(moment - since_s)
    return sum(found)
