"""What a simulated run leaves: records of its ranks, what their clocks come to, a time line in a file, rows of letters.

A record's ``time`` counts seconds since the ranks began; ``memory_bytes`` is what a rank is estimated to hold, on the
GPU of the cluster where there is one, since the process holds all of them; 0 where nobody has described the model.
For N ranks, over all steps (evaluations and set-up are left out):

    step        the longest of the ranks, median over the steps
    exposed     what ranks waited for others and for the network
    hidden      the share of the time of operations in which their rank computed, in steps whose spans it has kept
    efficiency  compute of all ranks / (N x time of the steps): 1 where nobody ever waits

The trace is for chrome://tracing or ui.perfetto.dev. Every rank has the rows of a profiled one: its steps, what it
computes and waits for, and what is on its way for it. It begins with the first step.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.chrome_trace import Event, name_process, span, write_events
from paceline.comm.traced import Trace
from paceline.comm.virtual.clock import ClockSpan, VirtualClock
from paceline.errors import RunFolderError
from paceline.notebook import Shown
from paceline.records.meter import StepFacts, StepMeter
from paceline.records.records import EndRecord, EvalRecord, Record, RunRecord, StepRecord
from paceline.records.sinks import Fanout, JsonlSink, Sink
from paceline.records.summary import FINAL_STEPS, StepTable, Totals, add_up
from paceline.rehearse.simulate.prices import KernelPrices
from paceline.schedule.clock import time_in_all
from paceline.train.trainer import Trainer
from paceline.units import format_seconds


class KeptRecords(Fanout):
    """A sink that keeps what it is given, dated by a rank's clock if there is one, and shows it to another sink."""

    def __init__(self, clock: VirtualClock | None = None, view: Sink | None = None) -> None:
        super().__init__([] if view is None else [view])
        self.records: list[Record] = []
        self._clock = clock

    def write(self, *records: Record) -> None:
        if self._clock is not None:
            # The meter has dated the records of steps, by the moment at which each ended.
            now_s = self._clock.now_s
            records = tuple(each if isinstance(each, StepRecord) else replace(each, time=now_s) for each in records)
        self.records += records
        super().write(*records)


@dataclass(frozen=True, slots=True)
class StepBounds:
    """From when to when a step lasted, on one rank's clock; ``busy_s``: how long a modelled GPU computed."""

    step: int
    start_s: float
    end_s: float
    busy_s: float | None = None


class ClockMeter(StepMeter):
    """Takes a step apart as any meter does, on a rank's clock; ``launches``: of modelled kernels, as a GPU's host."""

    launches: KernelPrices | None = None

    def __init__(self, device: torch.device, trace: Trace, clock: VirtualClock, memory_bytes: int) -> None:
        super().__init__(device, trace)
        self.steps: list[StepBounds] = []
        self._clock = clock
        self._expected_bytes = memory_bytes
        self._began_s = self._comm_at = clock.take()
        self._host_s: dict[int, float | None] = {}
        self._launched = (0.0, 0.0)

    def start(self) -> None:
        """Begins a step now; what was computed since the last one was something else, such as an evaluation."""
        super().start()
        self._clock.name("evaluation")
        self._began_s = self._clock.now_s
        if self.launches is not None:
            self._launched = (self.launches.work_s, self.launches.launch_s)

    def lap(self, phase: str) -> None:
        super().lap(phase)
        self._clock.name(phase)

    def finish(self, facts: StepFacts) -> bool:
        """Ends the step. Always time to drain: how often must not depend on the time of this machine."""
        super().finish(facts)
        busy_s = host_s = None
        if self.launches is not None and self.launches.launch_s:
            busy_s = self.launches.work_s - self._launched[0]
            launch_s = self.launches.launch_s - self._launched[1]
            host_s = launch_s if launch_s > busy_s else 0.0
            self._launched = (self.launches.work_s, self.launches.launch_s)
        self._host_s[facts.step] = host_s
        self.steps.append(StepBounds(facts.step, self._began_s, self._clock.now_s, busy_s))
        self._began_s = self._clock.now_s
        return True

    def drain(self, *, wait: bool = False) -> Iterator[StepRecord]:
        ends = {bounds.step: bounds.end_s for bounds in self.steps[-2:]}
        for record in super().drain(wait=wait):
            now_s = ends.get(record.step, self._clock.now_s)
            host_s = self._host_s.pop(record.step, None)
            expected = replace(record, memory_bytes=self._expected_bytes, peak_bytes=self._expected_bytes)
            # Launches that hide behind a wait for other ranks count too, but never for more than the step.
            host_s = None if host_s is None else min(host_s, record.step_s)
            yield replace(expected, allocated_bytes=None, time=now_s, host_s=host_s)

    def _now(self) -> float:
        return self._clock.now_s


def run_record(trainer: Trainer, rank: int, device: str, host: str) -> RunRecord:
    """Makes the first record of a rank. Nothing in it tells this process from another one."""
    plan = trainer.parts.plan
    degrees = [f"{name} {size}" for name in ("pipeline", "tensor") if (size := getattr(plan.layout, name)) > 1]
    return RunRecord(
        rank=rank,
        world_size=trainer.parts.engine.world.size,
        local_rank=rank,
        device=device,
        host=host,
        pid=0,
        python=platform.python_version(),
        torch=torch.__version__,
        paceline=__version__,
        num_parameters=trainer.parts.engine.num_parameters,
        num_trained=trainer.parts.engine.num_trained,
        strategy=" x ".join([*degrees, plan.layout.strategy]),
        backend="virtual",
        **{name: getattr(plan.batch, name) for name in ("global_batch", "microbatch", "accumulate")},
        total_steps=plan.total_steps,
        unit=trainer.parts.sample.unit,
        units_per_sample=trainer.parts.sample.units,
        time=0.0,
    )


def write_records(records: Sequence[Sequence[Record]], folder: Path, hosts: Sequence[Record] = ()) -> None:
    """Writes the records of ranks and hosts where a run has them. Raises RunFolderError if some are there already."""
    if any(folder.glob("records/rank-*.jsonl")):
        raise RunFolderError(
            f"{folder} has records of another run\n  a run never overwrites another\n  give another folder"
        )
    files = {f"rank-{rank}.jsonl": own for rank, own in enumerate(records)}
    for name, own in (files | ({"host-virtual.jsonl": hosts} if hosts else {})).items():
        try:
            with contextlib.closing(JsonlSink(folder / "records" / name)) as sink:
                sink.write(*own)
        except OSError as error:
            raise RunFolderError(
                f"cannot write records in {folder}: {error.strerror or error}\n  give a folder that can be written"
            ) from error


LETTERS = {"data": "d", "forward": "F", "backward": "B", "optimizer": "U", "evaluation": "e"}
LEGEND = "F forward  B backward  U update  d data  e evaluation  . waiting  = communication"
_WIDTH = 64
_ROWS = {"compute": "phases", "wait": "waits", "communication": "collectives"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRankTimes:
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
        events += name_process(clock.rank, f"rank {clock.rank}, simulated", ("steps", *_ROWS.values()))
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
