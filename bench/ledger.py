"""What the ledger costs: an operation alone, and steps of a small model with and without it, in turns.

    python bench/ledger.py --output bench/results/ledger-cpu.json

The two arms are two engines of the same ranks, which take blocks of steps in turns: what disturbs the machine disturbs
both. The operation alone is one that does nothing, so that what is left is the ledger.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from paceline.bench.record import make_record
from paceline.comm.base import DONE, Communicator, ReduceOp, Work
from paceline.comm.ledger import Ledger, LedgerCommunicator
from paceline.comm.shared_memory import share_memory
from paceline.comm.solo import SoloCommunicator
from paceline.launch.processes import run_processes
from paceline.models.mlp import MLPClassifier
from paceline.parallel.apply import parallelize

BLOCK, WIDTH, BATCH = 10, 512, 64


class Nothing(SoloCommunicator):
    """An all-reduce that is done at once."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Does nothing."""
        del tensor, op
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


def step_seconds(comm: Communicator, folder: str, blocks: int, backend: str) -> dict[str, list[float]]:
    """Returns the seconds of a step in each block, of two engines that take turns."""
    base = share_memory(comm, timeout_s=60.0) if backend == "shared_memory" else comm
    ledger = Ledger(rank=comm.rank, world=comm.size, path=Path(folder) / f"{backend}-{comm.rank}.ledger")
    arms = {"without": _arm(base), "with": _arm(LedgerCommunicator(base, ledger))}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(blocks + 2):
        for name, step in arms.items():
            start = time.perf_counter()
            for _ in range(BLOCK):
                step()
            if number >= 2:
                times[name].append((time.perf_counter() - start) / BLOCK)
    return times


def _arm(comm: Communicator) -> Any:
    torch.manual_seed(0)
    engine = parallelize(MLPClassifier(64, WIDTH, 10), comm, "ddp")
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    inputs, targets = torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        torch.nn.functional.cross_entropy(engine(inputs), targets).backward()  # type: ignore[no-untyped-call]
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measures, prints and writes a record."""
    parser = argparse.ArgumentParser(description="What the ledger costs.")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    alone = operation_seconds()
    rows: list[dict[str, Any]] = [{"what": "operation", **{f"{name}_us": 1e6 * s for name, s in alone.items()}}]
    for backend in ("gloo", "shared_memory"):
        with tempfile.TemporaryDirectory() as folder:
            found = run_processes(step_seconds, 2, args=(folder, asked.blocks, backend))[0]
        ratios = [b / a for a, b in zip(found["without"], found["with"], strict=True)]
        medians = {f"{name}_ms": 1e3 * statistics.median(times) for name, times in found.items()}
        rows.append({"what": f"step, {backend}", **medians, "ratio": statistics.median(ratios)})
    for row in rows:
        print(row)
    if asked.output is not None:
        command = f"python bench/ledger.py --blocks {asked.blocks} --output {asked.output}"
        config = {"width": WIDTH, "batch": BATCH, "block": BLOCK, "ranks": 2}
        make_record("ledger", command, rows, config).write(asked.output)


if __name__ == "__main__":
    main()
