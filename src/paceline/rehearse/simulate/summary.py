"""What the clocks of a simulated run come to: in numbers, as a time line in a file, as rows of letters.

For N ranks, over all steps (evaluations and set-up are left out):

    step        the longest of the ranks, median over the steps
    exposed     what ranks waited for others and for the network
    hidden      the share of the time of operations in which their rank computed, in steps whose spans it has kept
    efficiency  compute of all ranks / (N x time of the steps): 1 where nobody ever waits

The file is in the trace event format, for chrome://tracing or ui.perfetto.dev. Every rank has the rows of a profiled
one: its steps, what it computes and waits for, and what is on its way for it. It begins with the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.chrome_trace import Event, name_process, name_tracks, span, write_events
from paceline.comm.virtual.clock import ClockSpan, VirtualClock
from paceline.notebook import Shown
from paceline.records.records import EndRecord, EvalRecord, Record, StepRecord
from paceline.records.summary import FINAL_STEPS, StepTable, Totals, add_up
from paceline.rehearse.simulate.recording import StepBounds
from paceline.schedule.clock import time_in_all
from paceline.units import format_seconds

LETTERS = {"data": "d", "forward": "F", "backward": "B", "optimizer": "U", "evaluation": "e"}
LEGEND = "F forward  B backward  U update  d data  e evaluation  . waiting  = communication"
_WIDTH = 64
_ROWS = {"compute": "phases", "wait": "waits", "communication": "collectives"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRankTimes:
    """Seconds of one rank's steps together, and how much of its communication it did not wait for."""

    rank: int
    compute_s: float
    exposed_s: float
    hidden_share: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SimulationSummary(Shown):
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
    on_the_way_s = time_in_all(ways, inside)
    return SimulatedRankTimes(
        rank=rank,
        compute_s=totals.compute_s,
        exposed_s=totals.comm_s,
        hidden_share=time_in_all(ways, busy, inside) / on_the_way_s if on_the_way_s else 0.0,
    )


def trace_events(clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]) -> list[Event]:
    """Returns the spans of all ranks as trace events, in the order of ranks and times, from the first step on."""
    zero_s = min((bounds[0].start_s for bounds in steps if bounds), default=0.0)
    events: list[Event] = []
    for clock, bounds in zip(clocks, steps, strict=True):
        events += name_process(clock.rank, f"rank {clock.rank}, simulated")
        events += name_tracks(clock.rank, ("steps", *_ROWS.values()))
        events += [
            span(clock.rank, "steps", f"step {each.step}", each.start_s - zero_s, each.end_s - zero_s)
            for each in bounds
        ]
        later = [each for each in clock.spans if each.end_s > zero_s]
        for each in sorted(later, key=lambda one: (one.start_s, one.end_s, one.row)):
            name = f"wait for {each.name}" if each.row == "wait" else each.name
            more = {"bytes": each.num_bytes, "ranks": list(each.ranks)} if each.row == "communication" else None
            start_s = max(each.start_s, zero_s) - zero_s
            events.append(span(clock.rank, _ROWS[each.row], name, start_s, each.end_s - zero_s, more))
    return events


def write_trace(path: Path, clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]) -> None:
    """Writes the trace, compressed where its name ends in ``.gz``. Raises UsageError if it cannot be written."""
    write_events(path, trace_events(clocks, steps), {"kind": "simulated"})


def draw_step(clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]], *, most: int = 8) -> list[str]:
    """Draws the last step of the first ``most`` ranks: two rows each, a letter for what took most of its time."""
    if not steps or not all(steps):
        return []
    start_s = min(bounds[-1].start_s for bounds in steps)
    end_s = max(bounds[-1].end_s for bounds in steps)
    if end_s <= start_s:
        return []
    lines = []
    for clock in clocks[:most]:
        spans = [each for each in clock.spans if each.end_s > start_s and each.start_s < end_s]
        own = [(LETTERS.get(each.name, "?") if each.row == "compute" else ".", each) for each in spans]
        compute = _row([each for each in own if each[1].row != "communication"], start_s, end_s)
        network = _row([("=", each) for each in spans if each.row == "communication"], start_s, end_s)
        lines += [f"rank {clock.rank:<3} |{compute}|", f"{'':8} |{network}|"]
    if len(clocks) > most:
        lines.append(f"and {len(clocks) - most} ranks more: see the trace")
    return lines


def _row(spans: Iterable[tuple[str, ClockSpan]], start_s: float, end_s: float) -> str:
    cell_s = (end_s - start_s) / _WIDTH
    shares: list[dict[str, float]] = [{} for _ in range(_WIDTH)]
    for letter, each in spans:
        first = max(0, int((each.start_s - start_s) / cell_s))
        last = min(_WIDTH - 1, int((each.end_s - start_s) / cell_s))
        for cell in range(first, last + 1):
            low, high = start_s + cell * cell_s, start_s + (cell + 1) * cell_s
            share = min(high, each.end_s) - max(low, each.start_s)
            if share > 0:
                shares[cell][letter] = shares[cell].get(letter, 0.0) + share
    return "".join(max(sorted(share), key=lambda letter: share[letter]) if share else " " for share in shares)
