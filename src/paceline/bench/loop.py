"""What the loop itself costs: the trainer with meter, records and hooks, beside the bare step on the same batches."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from paceline.bench.interleave import Timing, interleave
from paceline.comm.base import Communicator
from paceline.config import Config, config_from_dict
from paceline.launch.processes import run_processes
from paceline.monitor.sinks import Fanout, JsonlSink, Strided, TensorBoardSink
from paceline.train.assemble import build_trainer
from paceline.train.step import train_step
from paceline.train.trainer import Every, StepResult, Trainer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopProtocol:
    """How long the two arms take turns. A turn is timed as a whole, since the trainer reads steps many at once."""

    rounds: int = 150
    steps_per_turn: int = 16
    warm_up: int = 1


def bench_loop(protocol: LoopProtocol) -> list[dict[str, Any]]:
    """Times the MLP of the engine benchmark, batch 64, one rank with one thread, both ways."""
    rows: list[dict[str, Any]] = run_processes(_time_loop, 1, args=(protocol,), threads=1)[0]
    return rows


def _time_loop(comm: Communicator, protocol: LoopProtocol) -> list[dict[str, Any]]:
    total = (protocol.warm_up + protocol.rounds) * protocol.steps_per_turn
    config = _config(total)
    with tempfile.TemporaryDirectory() as folder:
        records = JsonlSink(Path(folder) / "rank-0.jsonl")
        curves = Strided(TensorBoardSink(Path(folder) / "tensorboard"), config.monitor.log_every)
        sink = Fanout([records, curves])
        hooks = [Every(100, _idle), Every(7, _idle)]
        watched = build_trainer(config, comm, hooks=hooks, sink=sink)
        bare = build_trainer(config, comm)
        watched_steps, bare_batches = watched.steps(), bare.parts.loader.steps(0, total)

        def run_watched() -> None:
            for _ in range(protocol.steps_per_turn):
                result = next(watched_steps)
                for hook in watched.hooks:
                    hook(watched, result)

        def run_bare() -> None:
            parts = bare.parts
            for _ in range(protocol.steps_per_turn):
                train_step(parts.engine, parts.optimizer, next(bare_batches), parts.loss, parts.policy)

        arms = {"bare step": run_bare, "trainer": run_watched}
        timings = interleave(
            arms,
            baseline="bare step",
            rounds=protocol.rounds,
            steps_per_turn=1,
            warm_up=protocol.warm_up,
            device=torch.device("cpu"),
        )
        sink.close()
    return [_row(timing, protocol.steps_per_turn) for timing in timings]


def _row(timing: Timing, steps: int) -> dict[str, Any]:
    row = {"model": "mlp", "ranks": 1, **dataclasses.asdict(timing)}
    return {**row, "median_ms": timing.median_ms / steps, "spread_ms": timing.spread_ms / steps, "num_steps": steps}


def _idle(trainer: Trainer, result: StepResult) -> None:
    """A hook that does nothing, to be called when it is due."""


def _config(steps: int) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 512},
            "data": {"kind": "synthetic_classification", "samples": 4096, "features": 784},
            "train": {"steps": steps, "global_batch": 64},
        }
    )
