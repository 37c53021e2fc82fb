"""What the loop itself costs: the trainer with meter, records and hooks, beside the bare step on the same batches."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.interleave import Turns, interleave
from paceline.comm.base import Communicator
from paceline.config import Config, config_from_dict
from paceline.records.sinks import Fanout, JsonlSink, Sink, Strided, TensorBoardSink
from paceline.run.processes import run_processes
from paceline.train.assemble import build_trainer
from paceline.train.step import train_step
from paceline.train.trainer import Every

# A turn is as many steps as the trainer reads at once, and timed as a whole.
PROTOCOLS = {
    "mlp": Turns(rounds=100, steps_per_turn=64, warm_up=1),
    "gpt-11m": Turns(rounds=12, steps_per_turn=2, warm_up=1),
}


def bench_loop(model: str, protocol: Turns, ranks: int) -> list[dict[str, Any]]:
    """Times a model of the engine benchmark on Gloo ranks with one thread each, both ways."""
    rows: list[dict[str, Any]] = run_processes(_time_loop, ranks, args=(model, protocol))[0]
    return rows


def _time_loop(comm: Communicator, model: str, protocol: Turns) -> list[dict[str, Any]]:
    total = (protocol.warm_up + protocol.rounds) * protocol.steps_per_turn
    config = _config(model, total, comm.size)
    with tempfile.TemporaryDirectory() as folder:
        sinks: list[Sink] = [JsonlSink(Path(folder) / f"rank-{comm.rank}.jsonl")]
        if comm.rank == 0:
            sinks.append(Strided(TensorBoardSink(Path(folder) / "tensorboard"), config.monitor.log_every))
        sink = Fanout(sinks)
        hooks = [Every(100, lambda *_: None), Every(7, lambda *_: None)]  # called when due
        watched = build_trainer(config, comm, hooks=hooks, sink=sink)
        # Both arms train one model: two would lie differently in memory, which alone makes a step 1 % slower or faster.
        parts = watched.parts
        watched_steps, bare_batches = watched.steps(), parts.loader.steps(0, total)

        def run_watched() -> None:
            for _ in range(protocol.steps_per_turn):
                result = next(watched_steps)
                for hook in watched.hooks:
                    hook(watched, result)

        def run_bare() -> None:
            for _ in range(protocol.steps_per_turn):
                train_step(parts.engine, parts.optimizer, next(bare_batches), parts.loss, parts.policy)

        arms, turns = {"bare step": run_bare, "trainer": run_watched}, replace(protocol, steps_per_turn=1)
        timings = interleave(arms, turns, baseline="bare step", device=torch.device("cpu"), meet=comm.barrier)
        sink.close()
    steps = protocol.steps_per_turn
    per_step = [
        replace(each, median_ms=each.median_ms / steps, spread_ms=each.spread_ms / steps, num_steps=steps)
        for each in timings
    ]
    return [{"model": model, "ranks": comm.size, **asdict(timing)} for timing in per_step]


def _config(model: str, steps: int, ranks: int) -> Config:
    if model == "mlp":
        sections: dict[str, Any] = {
            "model": {"kind": "mlp", "hidden_dim": 512},
            "data": {"kind": "synthetic_classification", "samples": 4096, "features": 784},
            "train": {"steps": steps, "global_batch": 64 * ranks},
        }
    else:
        sections = {
            "model": {"kind": "gpt", "size": model, "context": 128},
            "data": {"kind": "synthetic_tokens", "samples": 256, "context": 128},
            "train": {"steps": steps, "global_batch": 4 * ranks},
        }
    return config_from_dict(sections)
