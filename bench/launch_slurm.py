"""From the command to the first step on Slurm: ``paceline launch --on slurm`` beside a bare ``srun torchrun`` script.

    sudo python bench/launch_slurm.py --output bench/results/launch-slurm-cpu.json

Both train the same small classifier with Gloo on two nodes, a rank on each. The clock starts when the command is called
(``paceline launch`` or ``sbatch``), and stops when rank 0 has done its first step. The arms take turns. Without
SLURM_CONF the script starts a Slurm on this machine (``scripts/slurm_test_cluster.py``; root).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from paceline.run.notes import read_progress
from paceline_bench.timing import BenchRecord

CLUSTER = Path(__file__).parents[1] / "scripts" / "slurm_test_cluster.py"
PATIENCE_S = 300.0
NODES = 2
OURS, BARE = "paceline launch --on slurm", "sbatch, srun torchrun, bare DDP script"
CONFIG = """
name: run
model: {kind: mlp, hidden_dim: 256, dropout: 0.0}
data: {kind: synthetic_classification, features: 64, classes: 10, samples: 4096, eval_fraction: 0.0}
train: {steps: 1000000, global_batch: 64}
optim: {kind: adamw, lr: 0.001}
parallel: {device: cpu, threads: 1, node_ranks: 1}
comm: {backend: gloo}
monitor: {tensorboard: false, console: false}
"""
SCRIPT = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
parallel = DistributedDataParallel(model)
generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
while True:
    inputs = torch.randn(32, 64, generator=generator)
    targets = torch.randint(10, (32,), generator=generator)
    nn.functional.cross_entropy(parallel(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        Path("first-step").touch()
"""
BATCH = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output=log
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
srun {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node 1 --rdzv-id $SLURM_JOB_ID \\
  --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:$((20000 + SLURM_JOB_ID % 10000)) bare.py
"""


def main() -> int:
    """Measures both arms in turn, and prints the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="at least 2")
    parser.add_argument("--output", type=Path, help="also write the record to this file")
    asked = parser.parse_args()
    if "SLURM_CONF" not in os.environ:
        command = [sys.executable, str(CLUSTER), "--", sys.executable, *sys.argv]
        return subprocess.run(command, check=False).returncode
    rows = measure(asked.rounds)
    command = "python bench/launch_slurm.py"
    record = BenchRecord(
        name="launch-slurm", command=command, rows=rows, config={"rounds": asked.rounds, "nodes": NODES}
    )
    if asked.output is not None:
        record.write(asked.output)
    print(record.to_json())
    return 0


def measure(rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each arm, with the ratio to the bare script of the same round."""
    arms = {OURS: start_ours, BARE: start_bare}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        order = list(arms.items())
        for name, start in order if number % 2 else reversed(order):
            with tempfile.TemporaryDirectory() as folder:
                seconds = first_step(start, Path(folder))
            if number:  # the first round reads the libraries from the disk
                found[name].append(seconds)
            print(f"round {number} of {rounds}: {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return [row(name, times, found[BARE]) for name, times in found.items()]


def first_step(start: Callable[[Path], Callable[[], bool]], folder: Path) -> float:
    """Returns the seconds from the command to the first step, and ends the job."""
    began = time.perf_counter()
    has_stepped = start(folder)
    try:
        while not has_stepped():
            if time.perf_counter() - began > PATIENCE_S:
                logs = "\n".join(path.read_text() for path in folder.rglob("log") if path.is_file())
                sys.exit(f"no step within {PATIENCE_S:g} s\n{logs}")
            time.sleep(0.002)
        return time.perf_counter() - began
    finally:
        slurm("scancel", "--signal=KILL", "--full", "--user=root")
        while slurm("squeue", "--noheader"):
            slurm("scancel", "--user=root")
            time.sleep(0.2)


def start_ours(folder: Path) -> Callable[[], bool]:
    """Launches a run; returns what says whether rank 0 has done a step."""
    (folder / "config.yaml").write_text(CONFIG)
    words = [
        sys.executable,
        "-m",
        "paceline",
        "launch",
        "config.yaml",
        "--on",
        "slurm",
        "--nodes",
        str(NODES),
        "--detach",
    ]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)

    def has_stepped() -> bool:
        with contextlib.suppress(OSError):
            own = read_progress(folder / "runs" / "run").get(0)
            return own is not None and own.last_step > 0
        return False

    return has_stepped


def start_bare(folder: Path) -> Callable[[], bool]:
    """Submits the bare script; returns what says whether rank 0 has done a step."""
    (folder / "bare.py").write_text(SCRIPT)
    (folder / "batch").write_text(BATCH.format(nodes=NODES, python=sys.executable))
    subprocess.run(["sbatch", "--parsable", "batch"], cwd=folder, check=True, capture_output=True)
    return (folder / "first-step").exists


def row(name: str, times: Sequence[float], bare: Sequence[float]) -> dict[str, Any]:
    """Returns what the record keeps of an arm: seconds, and the ratio within each round with its quartiles."""
    ratios = [own / other for own, other in zip(times, bare, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return {
        "arm": name,
        "median_s": round(median(times), 3),
        "least_s": round(min(times), 3),
        "most_s": round(max(times), 3),
        "ratio": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "seconds": [round(each, 3) for each in times],
    }


def slurm(*words: str) -> str:
    """Runs one of Slurm's commands, and returns what it prints."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())
