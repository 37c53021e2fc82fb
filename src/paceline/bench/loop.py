"""What the loop itself costs: the trainer with meter, records and hooks, beside the bare step on the same batches."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from paceline.bench.interleave import Turns, interleave
from paceline.calibrate.families import looped_step, recording_trainer
from paceline.comm.base import Communicator
from paceline.config import Config, config_from_dict
from paceline.run.processes import run_processes
from paceline.train.step import train_step

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
    with recording_trainer(config, comm) as trainer:
        # Both arms train one model: two would lie differently in memory, which alone makes a step 1 % slower or faster.
        parts, watched_step = trainer.parts, looped_step(trainer)
        bare_batches = parts.loader.steps(0, total)

        def run_watched() -> None:
            for _ in range(protocol.steps_per_turn):
                watched_step()

        def run_bare() -> None:
            for _ in range(protocol.steps_per_turn):
                train_step(parts.engine, parts.optimizer, next(bare_batches), parts.loss, parts.policy)

        arms, turns = {"bare step": run_bare, "trainer": run_watched}, replace(protocol, steps_per_turn=1)
        timings = interleave(arms, turns, baseline="bare step", device=torch.device("cpu"), meet=comm.barrier)
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
