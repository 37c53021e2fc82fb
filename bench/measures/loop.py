"""What the loop itself costs: the trainer with meter, records and hooks, beside the bare step on the same batches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.calibrate.timing import looped_step, recording_trainer
from paceline.comm.base import DONE, Call, Communicator, Work
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.shared.communicator import share_memory
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import LedgerCommunicator, Trace, TracedCommunicator
from paceline.config import Config, config_from_dict
from paceline.engines.apply import parallelize
from paceline.models.mlp import MLPClassifier
from paceline.run.function_ranks import run_processes
from paceline.run.own_loop import watch_ranks
from paceline.train.step import train_step
from paceline_bench.timing import Timing, Turns, interleave, rotate, time_step, timing_of

# What the ledger costs: an operation alone, and steps of a small model with and without it, in turns.
#
# The two arms of a step are two engines of the same ranks, traced as in training, which take blocks of steps in turns:
# what disturbs the machine disturbs both. The operation alone is one that does nothing, so that what is left is the
# ledger.


BLOCK, WIDTH, BATCH = 10, 512, 64
BACKENDS = ("gloo", "shared_memory")


_STEPS = {"with": "step", "watched": "step of an own loop that is watched"}


def bench_ledger(blocks: int) -> list[dict[str, Any]]:
    """Returns a row for an operation alone, and for steps of two ranks by backend: with a ledger, and watched."""
    alone = operation_seconds()
    rows: list[dict[str, Any]] = [{"what": "operation", **{f"{name}_s": seconds for name, seconds in alone.items()}}]
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            bare, *others = run_processes(time_steps, 2, args=(folder, blocks, backend))[0]
        for each in others:
            seconds = {"without_s": bare.median_ms / 1e3 / BLOCK, "with_s": each.median_ms / 1e3 / BLOCK}
            spread = {"ratio": each.ratio, "ratio_low": each.ratio_low, "ratio_high": each.ratio_high}
            rows.append({"what": f"{_STEPS[each.arm]}, {backend}", **seconds, **spread})
    return rows


class Nothing(SoloCommunicator):
    """Operations that are done at once."""

    def issue(self, call: Call) -> Work:
        del call
        return DONE


def operation_seconds() -> dict[str, float]:
    """Returns the least time of an operation in blocks of 200, without and with a ledger."""
    comm: Communicator = Nothing(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        kept = LedgerCommunicator(comm, Ledger(rank=0, world=1, path=Path(folder) / "x.ledger"))
        times: dict[str, list[float]] = {"without": [], "with": []}
        tensor = torch.zeros(1000)
        for _ in range(300):
            for name, each in (("without", comm), ("with", kept)):
                start = time.perf_counter()
                for _ in range(200):
                    each.all_reduce(tensor).wait()
                times[name].append((time.perf_counter() - start) / 200)
    return {name: min(found) for name, found in times.items()}


def time_steps(comm: Communicator, folder: str, blocks: int, backend: str) -> list[Timing]:
    """Times blocks of steps of engines that take turns: without a ledger, with one, and watched as an own loop is."""
    base = share_memory(comm, timeout_s=60.0) if backend == "shared_memory" else comm
    ledger = Ledger(rank=comm.rank, world=comm.size, path=Path(folder) / f"{backend}-{comm.rank}.ledger")
    arms = {
        "without": _arm(base),
        "with": _arm(LedgerCommunicator(base, ledger)),
        "watched": _arm(watch_ranks(base, Path(folder) / backend)),
    }
    turns = Turns(rounds=blocks, steps_per_turn=1, warm_up=2)
    return interleave(arms, turns, baseline="without", device=comm.device)


def _arm(comm: Communicator) -> Callable[[], None]:
    """Returns a block of steps."""
    torch.manual_seed(0)
    trace = Trace(comm.device)
    engine = parallelize(MLPClassifier(64, WIDTH, 10), TracedCommunicator(comm, trace), "ddp")
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    inputs, targets = torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))

    def run_block() -> None:
        for _ in range(BLOCK):
            torch.nn.functional.cross_entropy(engine(inputs), targets).backward()  # type: ignore[no-untyped-call]
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            trace.take_waits()

    return run_block


# A turn is as many steps as the trainer reads at once, and counts as a whole. Inside it the arms take single steps in
# turns: what a busy machine does to a step, it does to the next one, and turns apart it would hide one per cent.
PROTOCOLS = {
    "mlp": Turns(rounds=100, steps_per_turn=64, warm_up=1),
    "gpt-11m": Turns(rounds=30, steps_per_turn=2, warm_up=1),
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
        parts, run_watched = trainer.parts, looped_step(trainer)
        bare_batches = parts.loader.steps(0, total)

        def run_bare() -> None:
            train_step(parts.engine, parts.optimizer, next(bare_batches), parts.loss, parts.policy)

        arms = {"bare step": run_bare, "trainer": run_watched}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(protocol.warm_up + protocol.rounds):
            turn = dict.fromkeys(arms, 0.0)
            for name in rotate(list(arms), protocol.steps_per_turn):
                parts.meter.start()  # what the other arm did is not the trainer's
                comm.barrier()
                turn[name] += time_step(arms[name], comm.device)
            if number >= protocol.warm_up:
                for name, taken in turn.items():
                    seconds[name].append(taken / protocol.steps_per_turn)
    timings = [timing_of(name, "bare step", seconds[name], seconds) for name in arms]
    return [{"model": model, "ranks": comm.size, **asdict(timing)} for timing in timings]


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
