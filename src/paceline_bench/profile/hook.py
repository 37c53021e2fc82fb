"""A config on real ranks for a few steps under torch's profiler: a run as ``paceline train`` makes it, and a hook.

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
from paceline.config import Config
from paceline.config.train_checks import short_run
from paceline.engines.pipeline import Pipeline
from paceline.errors import UsageError
from paceline.run.location import RunOptions
from paceline.run.processes import profile_request
from paceline.schedule.grid import Action
from paceline.train.step import StepResult
from paceline.train.trainer import Trainer
from paceline.untrusted import parse_json, read_regular
from paceline_bench.profile.merge import ANCHOR, Operator, RankProfile, RankSpans, TraceSpan, costliest, place_rank

HOOK = "paceline_bench.profile.hook:StepProfiler"
WARM_UP = 3
_MOST_BYTES = 2**31


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
            operators=_operators(self._profile),
        )
        self._profile.export_chrome_trace(str(folder / f"rank-{rank}.torch.json"))
        (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
        self._profile = None
        world.barrier()  # the first to leave ends the others, who may still be writing


def _operators(found: profile) -> tuple[Operator, ...]:
    return costliest(
        (each.key, each.count, each.self_cpu_time_total / 1e6, each.self_device_time_total / 1e6)
        for each in found.key_averages()
        if each.key not in (ANCHOR, "[memory]") and not each.key.startswith("ProfilerStep")
    )


def profiled_config(config: Config, steps: int, folder: Path) -> Config:
    """Returns the config of the run that is profiled. Raises UsageError for one without processes of its own."""
    if config.comm.backend == "virtual":
        raise UsageError(
            "comm.backend = virtual\n  virtual ranks share one process, and torch profiles processes\n"
            "  take paceline simulate CONFIG --trace simulated.json, or comm.backend = auto"
        )
    config = short_run(config, WARM_UP + steps).with_values("train", hooks=(*config.train.hooks, HOOK))
    quiet = {"folder": str(folder), "console": False, "tensorboard": False, "trackers": (), "trace": False}
    return config.with_values("monitor", **quiet).model_copy(update={"name": "profiled"})


def profile_run(config: Config, steps: int, folder: Path) -> list[RankProfile]:
    """Profiles so many steps after the warm-up, of which ranks leave what they saw in ``folder``."""
    from paceline.run.train import train  # not by ranks, which load this file for the hook

    train(profiled_config(config, steps, folder / "runs"), options=RunOptions(is_quiet=True))
    paths = sorted(folder.glob("rank-*.torch.json"), key=lambda it: int(it.name.split(".")[0].removeprefix("rank-")))
    if not paths:
        raise UsageError(
            f"the run ended before the profile began\n  {WARM_UP} steps are warm-up, and {steps} are profiled\n"
            "  give the run more data, or fewer --steps"
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> RankProfile:
    spans = RankSpans.from_json(parse_json(read_regular(path.with_name(path.name.replace(".torch", "")), _MOST_BYTES)))
    return place_rank(spans, parse_json(read_regular(path, _MOST_BYTES), _MOST_BYTES))
