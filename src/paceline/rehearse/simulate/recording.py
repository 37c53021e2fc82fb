"""Records of a simulated rank: those of a real one, with the times of its clock.

A record's ``time`` counts seconds since the ranks began; ``memory_bytes`` is what a rank is estimated to hold, on the
GPU of the cluster where there is one, since the process holds all of them; 0 where nobody has described the model.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline import __version__
from paceline.comm.traced import Trace
from paceline.comm.virtual.clock import VirtualClock
from paceline.errors import RunFolderError
from paceline.records.meter import StepFacts, StepMeter
from paceline.records.records import Record, RunRecord, StepRecord
from paceline.records.sinks import JsonlSink, Sink
from paceline.rehearse.simulate.prices import KernelPrices
from paceline.train.trainer import Trainer


class KeptRecords:
    """A sink that keeps what it is given, dated by a rank's clock if there is one, and shows it to another sink."""

    def __init__(self, clock: VirtualClock | None = None, view: Sink | None = None) -> None:
        self.records: list[Record] = []
        self._clock, self._view = clock, view

    def write(self, *records: Record) -> None:
        if self._clock is not None:
            # The meter has dated the records of steps, by the moment at which each ended.
            now_s = self._clock.now_s
            records = tuple(each if isinstance(each, StepRecord) else replace(each, time=now_s) for each in records)
        self.records += records
        if self._view is not None:
            self._view.write(*records)

    def flush(self) -> None:
        if self._view is not None:
            self._view.flush()

    def close(self) -> None:
        if self._view is not None:
            self._view.close()


@dataclass(frozen=True, slots=True)
class StepBounds:
    """From when to when a step lasted, on one rank's clock.

    ``busy_s`` is how long a modelled GPU ran kernels that compute; None where the host computes itself.
    """

    step: int
    start_s: float
    end_s: float
    busy_s: float | None = None


class ClockMeter(StepMeter):
    """Takes a step apart as any meter does, on a rank's clock, whose compute it names by phase.

    With ``launches``, those of modelled kernels, records say how long the host took to issue a step that the device was
    waiting for, as on a GPU.
    """

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
        global_batch=plan.batch.global_batch,
        microbatch=plan.batch.microbatch,
        accumulate=plan.batch.accumulate,
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
