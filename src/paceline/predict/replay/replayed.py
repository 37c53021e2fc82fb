"""What a replay found: the time of a step and where it goes, memory, rates, what binds; a trace for ui.perfetto.dev.

step    = compute + contention + exposed communication + bubble + launch wait + work of the host + loop
          of the rank that ends last
hidden  = what communication takes in all, less what is exposed
MFU     = model FLOPs of a rank / (step x the device's peak)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paceline.chrome_trace import Event, name_process, name_track, span, write_events
from paceline.cluster.devices import Cluster
from paceline.errors import UsageError
from paceline.notebook import Shown
from paceline.predict.formulas.step import COMPOSED_P90, FITTED_P90
from paceline.predict.replay.kernel_costs import kernel_seconds
from paceline.predict.replay.program import Program
from paceline.schedule.clock import Span
from paceline.units import format_bytes, format_seconds

# How far off each part may be: kernels outside the calibrated domain, and of a device that was measured (bench/results/
# predict-h200.json); small collectives, which vTrain's traces have a third slower, and the hosts of other machines.
_KERNELS = (0.13, 0.05)
_WAITS = 0.3
_TIMED = 0.02  # of kernels that were timed one by one: what clocks and caches are otherwise beside others
DoubtedPart: TypeAlias = Literal["kernels", "communication", "the host"]


@dataclass(slots=True, kw_only=True)
class ReplayedRank:
    """Seconds of one rank's step. ``slowed`` is what its own work, of host and device, was multiplied by."""

    rank: int
    stage: int
    slowed: float = 1.0
    seconds: float = 0.0
    compute: float = 0.0
    contention: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    launch_wait: float = 0.0
    on_host: float = 0.0  # what the host computes itself, while the device stands still
    loop: float = 0.0  # of a run: the next batch, times, records, hooks
    phases: dict[str, float] = field(default_factory=dict)
    communication: dict[str, float] = field(default_factory=dict)  # seconds by kind
    moved: dict[str, int] = field(default_factory=dict)  # bytes by kind
    spans: tuple[Span, ...] = ()

    def add_phase(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    @property
    def hidden(self) -> float:
        """Communication that compute did not wait for; messages of a pipeline are in ``bubble`` where it did."""
        return max(0.0, sum(self.communication.values()) - self.exposed - self.bubble)

    @property
    def idle(self) -> float:
        """What the device stands still at the end, while the host finishes."""
        told = self.compute + self.contention + self.exposed + self.bubble + self.launch_wait + self.on_host
        return max(0.0, self.seconds - told - self.loop)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReplayedStep(Shown):
    programs: tuple[Program, ...]  # one for each stage of a pipeline
    cluster: Cluster
    times: tuple[ReplayedRank, ...]
    memory: Mapping[str, int]
    is_fitted: bool
    slow: Mapping[int, float]
    shown: int | None = None  # the rank that the report describes
    rough: str = ""  # in words, where another model stood in for this one

    @property
    def program(self) -> Program:
        return self.programs[0]

    @property
    def framework(self) -> str:
        return "compiled" if self.program.is_compiled else "eager"

    @property
    def seconds(self) -> float:
        return max(each.seconds for each in self.times)

    @property
    def longest(self) -> ReplayedRank:
        """The rank that the report describes: ``shown``, or its stage's; else the one that computes most."""
        if self.shown is not None:
            stage = self.shown // (self.program.ranks // (1 + max(each.stage for each in self.times)))
            own = [each for each in self.times if each.rank == self.shown]
            return (own or [each for each in self.times if each.stage == stage])[0]
        return max(self.times, key=lambda each: (each.compute, each.seconds))

    @property
    def band(self) -> tuple[float, float]:
        """Seconds between which nine of ten published runs were, of those inside or outside what was calibrated."""
        error = COMPOSED_P90 if self.outside else FITTED_P90
        return self.seconds * (1 - error), self.seconds * (1 + error)

    @property
    def elements_per_s(self) -> float:
        return self.program.elements / self.seconds

    @property
    def mfu(self) -> float:
        """The share of the device's peak that the model's own FLOPs come to, over all stages."""
        mean_flops = sum(each.model_flops for each in self.programs) / len(self.programs)
        return mean_flops / (self.seconds * self.cluster.device.peak(self.program.dtype))

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total_memory <= int(self.cluster.device.memory_bytes)

    def facts(self) -> dict[str, object]:
        program, (low, high) = self.program, self.band
        return {
            "run": program.name,
            "ranks": f"{program.ranks} of {self.cluster.name}, {program.strategy}",
            "step": f"{format_seconds(self.seconds)} ({format_seconds(low)} to {format_seconds(high)})",
            f"{program.element}/s": self.elements_per_s,
            "MFU": f"{self.mfu:.1%}",
            "memory": f"{format_bytes(self.total_memory)}{'' if self.fits else ': does not fit'}",
            "limited by": self.binds,
        }

    def usd_per_step(self, usd_per_device_hour: float) -> float:
        return self.program.ranks * self.seconds / 3600 * usd_per_device_hour

    @property
    def binds(self) -> str:
        """Says what the step would be shorter without, in one sentence."""
        rank, step = self.longest, self.seconds
        parts = {
            "the kernels themselves": rank.compute,
            "communication that nothing hides": rank.exposed,
            "the bubble of the pipeline": rank.bubble,
            "the host, which launches kernels more slowly than the device runs them": rank.launch_wait,
            "the host, which updates what is offloaded": rank.on_host,
            "communication beside compute, which slows it": rank.contention,
            "the loop around the step: the next batch, records, hooks": rank.loop,
        }
        what, seconds = max(parts.items(), key=lambda each: each[1])
        told = f"{what}: {seconds / step:.0%} of the step"
        worst = max(self.slow, key=lambda each: self.slow[each], default=0)
        if self.slow.get(worst, 1.0) > 1:
            told += f"; all ranks wait for rank {worst}, which is {self.slow[worst]:g}x as slow"
        return told

    @property
    def doubts(self) -> dict[DoubtedPart, float]:
        """Seconds by which parts of the step may be off, the largest first."""
        rank, each = self.longest, _KERNELS[bool(self.cluster.device.memory_rates)]
        timed = self.timed_share
        found: dict[DoubtedPart, float] = {
            "kernels": rank.compute * (each * (1 - timed) + _TIMED * timed),
            "communication": (rank.exposed + rank.contention) * _WAITS,
            "the host": (rank.launch_wait + rank.loop + rank.on_host) * _WAITS,
        }
        return dict(sorted(found.items(), key=lambda part: -part[1]))

    @property
    def timed_share(self) -> float:
        """The share of the time of kernels that is of those which were timed one by one, for a config such as this."""
        known = self.cluster.device.kernels
        if not known:
            return 0.0
        own = kernel_seconds(self.program, self.cluster)
        timed = sum(seconds for operation, (_, seconds) in own.items() if operation.label in known)
        return timed / (sum(seconds for _, seconds in own.values()) or 1.0)

    @property
    def doubt(self) -> str:
        """Says which part makes most of the uncertainty, and the smallest measurement that tells it."""
        (what, seconds), *_ = self.doubts.items()
        measurement = "paceline calibrate --for CONFIG on such a device"
        if what == "communication" and self.cluster.nodes > 1:
            measurement = "ten steps on two nodes of such links"
        elif not self.cluster.device.memory_rates:
            measurement = f"paceline calibrate on one {'node' if what == 'communication' else 'device'}"
        return f"{what}, by about {seconds / self.seconds:.0%} of the step; {measurement} would tell"

    @property
    def outside(self) -> tuple[str, ...]:
        found = [self.rough] if self.rough else []
        if not self.is_fitted:
            generation = self.cluster.device.generation
            found.append(f"no published run fitted {self.framework} code on {generation}: rates are composed of others")
        if any(each.on_host for each in self.times):
            found.append("offloaded states: no published run has them")
        if self.program.element != "tokens":
            found.append("the error band was earned on language models")
        if not self.fits:
            found.append("it does not fit into memory, so that it would not run")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        program, rank, (low, high) = self.program, self.longest, self.band
        return {
            "name": program.name,
            "cluster": self.cluster.name,
            "device": self.cluster.device.name,
            "ranks": program.ranks,
            "strategy": program.strategy,
            "step_s": self.seconds,
            "step_s_low": low,
            "step_s_high": high,
            f"{program.element}_per_s": self.elements_per_s,
            "samples_per_s": program.samples / self.seconds,
            "mfu": self.mfu,
            "parts_s": {"compute": rank.compute, "contention": rank.contention, "exposed_communication": rank.exposed}
            | {name: getattr(rank, name) for name in ("bubble", "launch_wait", "loop", "on_host", "idle")},
            "hidden_communication_s": rank.hidden,
            "phases_s": dict(rank.phases),
            "communication_s": dict(rank.communication),
            "communication_bytes": dict(rank.moved),
            "stages": [
                {"stage": each.stage, "rank": each.rank, "slowed": each.slowed, "step_s": each.seconds}
                | {"compute_s": each.compute, "bubble_s": each.bubble}
                for each in self.times
            ],
            "memory_bytes": dict(self.memory) | {"total": self.total_memory},
            "device_memory_bytes": int(self.cluster.device.memory_bytes),
            "fits": self.fits,
            "fitted": self.is_fitted,
            "binds": self.binds,
            "doubt": self.doubt,
            "doubts_s": dict(self.doubts),
            "timed_share": self.timed_share,
            "outside_calibration": list(self.outside),
        }


def trace_events(replay: ReplayedStep) -> list[Event]:
    """Returns the spans of all ranks as trace events. Raises UsageError for a replay that kept no spans."""
    if not any(each.spans for each in replay.times):
        raise UsageError("this replay kept no spans\n  a trace shows them\n  replay(..., keeps_spans=True)")
    events: list[Event] = []
    for process, times in enumerate(replay.times):
        slowed = f", {times.slowed:g}x as slow" if times.slowed != 1 else ""
        events += name_process(process, f"rank {times.rank}, stage {times.stage}{slowed}")
        rows = sorted({_row(each) for each in times.spans}, key=lambda row: (row != "compute", row))
        events += [name_track(process, number, row) for number, row in enumerate(rows)]
        for each in times.spans:
            own = {"cat": each.stream.removeprefix("compute "), "tid": rows.index(_row(each))}
            events.append(span(process, "phases", each.name, each.start, each.end) | own)
    return events


def _row(found: Span) -> str:
    return "compute" if found.stream.startswith("compute") else found.stream


def write_trace(replay: ReplayedStep, path: Path) -> None:
    """Writes the trace, compressed where its name ends in ``.gz``. Raises UsageError if it cannot be written."""
    about = {"name": replay.program.name, "cluster": replay.cluster.name}
    write_events(path, trace_events(replay), about | {"step_s": replay.seconds, "binds": replay.binds})
