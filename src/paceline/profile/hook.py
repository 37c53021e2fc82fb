"""The hook of a rank that is profiled: it starts torch's profiler after the warm-up, and leaves what it saw.

    warm-up          steps that pay for start-up, allocators and bucket choices
    clocks           a few messages to and fro say how far this rank's clock is ahead of rank 0's
    profiled steps   torch's profiler, with memory; ours beside it: phases, collectives, waits, actions of a schedule
    end              rank-<r>.torch.json (torch's trace) and rank-<r>.json (``RankSpans``) in the folder of the profile

Spans are read from the host's clock. On CUDA they say when the host issued something; torch's kernels say when the
device did it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.comm.objects import clock_offset
from paceline.engines.pipeline import Pipeline
from paceline.profile.merge import ANCHOR, Operator, RankSpans, TraceSpan
from paceline.run.processes import profile_request
from paceline.schedule.grid import Action
from paceline.train.step import StepResult
from paceline.train.trainer import Trainer

WARM_UP = 3
_MOST_OPERATORS = 50


class StepProfiler:
    """Profiles the steps after the warm-up, up to the last of the run. A hook of ``train.hooks``: made by its name."""

    def __init__(self) -> None:
        self._folder = profile_request()
        self._profile: profile | None = None
        self._spans: dict[str, list[TraceSpan]] = {name: [] for name in ("steps", "phases", "waits", "actions")}
        self._since = self._step_since = self._action_since = self._wait_since = 0.0
        self._anchor_s = 0.0
        self._clock = (0.0, 0.0)

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Starts after the warm-up, notes each step, and stops after the last one."""
        if self._folder is None:
            return
        if self._profile is not None:
            self._note("steps", f"step {result.step}", self._step_since)
        if result.step == WARM_UP and not result.is_last:
            self._start(trainer)
        elif result.is_last and self._profile is not None:
            self._stop(trainer, self._folder)
        self._since = self._step_since = time.perf_counter()

    def _start(self, trainer: Trainer) -> None:
        world = trainer.parts.engine.world
        self._clock = clock_offset(world, time.perf_counter)
        world.barrier()
        meter, trace = trainer.parts.meter, world.trace
        meter.lap = partial(self._lap, meter.lap)  # type: ignore[method-assign]
        if trace is not None:
            trace.operations.clear()
            trace.keep = True
            trace.begin_wait = partial(self._begin_wait, trace.begin_wait)  # type: ignore[method-assign]
            trace.end_wait = partial(self._end_wait, trace.end_wait)  # type: ignore[method-assign]
        pipeline = getattr(trainer.parts.engine, "pipeline", None)
        if isinstance(pipeline, Pipeline):
            pipeline.on_action = self._end_action
        activities = [ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(world.device)
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()
        with record_function(ANCHOR):
            self._anchor_s = time.perf_counter()

    def _note(self, track: str, name: str, since_s: float) -> float:
        """Adds what has lasted since then to a track; returns the time now."""
        now = time.perf_counter()
        self._spans[track].append(TraceSpan(name=name, start_s=since_s, end_s=now))
        return now

    def _lap(self, lap: Callable[[str], None], phase: str) -> None:
        lap(phase)
        self._since = self._note("phases", phase, self._since)
        if phase == "data":
            self._action_since = self._since

    def _begin_wait(self, begin_wait: Callable[[], Any]) -> Any:
        """Notes when the host stands still for an operation. On CUDA it does not, and kernels tell."""
        start = begin_wait()
        if start is not None:
            self._wait_since = time.perf_counter()
        return start

    def _end_wait(self, end_wait: Callable[[Any], None], start: Any) -> None:
        end_wait(start)
        if start is not None:
            self._note("waits", "wait", self._wait_since)

    def _end_action(self, action: Action) -> None:
        """Notes an action of a pipeline's schedule, from the end of the one before."""
        self._action_since = self._note("actions", str(action), self._action_since)

    def _stop(self, trainer: Trainer, folder: Path) -> None:
        world = trainer.parts.engine.world
        assert self._profile is not None
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        self._profile.stop()
        rank, collectives = world.rank, []
        for each in [] if world.trace is None else world.trace.operations:
            more: dict[str, Any] = {"num_bytes": each.num_bytes, "ranks": each.group}
            collectives.append(TraceSpan(name=each.kind, start_s=each.start_s, end_s=each.end_s, **more))
        found = RankSpans(
            rank=rank,
            device=world.device.type,
            ahead_s=self._clock[0],
            clock_error_s=self._clock[1],
            anchor_s=self._anchor_s,
            tracks={**self._spans, "collectives": collectives},
            operators=tuple(_operators(self._profile)),
        )
        self._profile.export_chrome_trace(str(folder / f"rank-{rank}.torch.json"))
        (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
        self._profile = None
        world.barrier()  # the first to leave ends the others, who may still be writing


def _operators(found: profile) -> list[Operator]:
    """Returns the operators that took most time of their own, on the device and on the host."""
    rows = [
        Operator(each.key, each.count, each.self_cpu_time_total / 1e6, each.self_device_time_total / 1e6)
        for each in found.key_averages()
        if each.key not in (ANCHOR, "[memory]") and not each.key.startswith("ProfilerStep")
    ]
    return sorted(rows, key=lambda each: -(each.host_s + each.device_s))[:_MOST_OPERATORS]
