"""Runs that ``paceline launch`` starts: a small project, whose steps take as long as a file says, and what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.checkpoint import list_checkpoints, open_checkpoint
from paceline.records.records import EventRecord, Record, RunRecord, StepRecord, read_records

CONFIG = """
name: tiny
model: {kind: mlp, hidden_dim: 8}
data: {kind: synthetic_classification, samples: 256}
train: {steps: 60, global_batch: 12, loss: "slow_loss:loss"}
parallel: {device: cpu, threads: 1, node_ranks: 1}
checkpoint: {every_steps: 20}
monitor: {tensorboard: false}
"""
# The steps of a test that disturbs a run must last; those of the run that it is compared with need not.
LOSS = """
import contextlib
import time
from pathlib import Path
import torch.nn.functional as F

def loss(model, batch):
    inputs, targets = batch
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float(Path("pause").read_text()))
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)
"""
PATIENCE_S = 400.0


def make_project(folder: Path, *, pause_s: float = 0.0) -> Path:
    """Writes the config, and how long a step takes at least."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.yaml").write_text(CONFIG)
    (folder / "slow_loss.py").write_text(LOSS)
    if pause_s:
        set_pause(folder, pause_s)
    return folder


def set_pause(folder: Path, pause_s: float) -> None:
    """Sets how long a step takes at least, also while ranks train: none reads half a file."""
    partial = folder / "pause-partial"
    partial.write_text(str(pause_s))
    partial.replace(folder / "pause")


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a user: without what a launcher of the tests has set."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    return {name: value for name, value in os.environ.items() if name not in names} | more


def paceline(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Calls the command line in a project, and waits for it."""
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def records(folder: Path, run: str = "tiny", rank: int = 0) -> list[Record]:
    """Returns what a rank has written down so far."""
    path = folder / "runs" / run / "records" / f"rank-{rank}.jsonl"
    return list(read_records(path)) if path.exists() else []


def starts(folder: Path, run: str = "tiny", rank: int = 0) -> list[RunRecord]:
    return [each for each in records(folder, run, rank) if isinstance(each, RunRecord)]


def steps(folder: Path, run: str = "tiny") -> list[int]:
    return [each.step for each in records(folder, run) if isinstance(each, StepRecord)]


def events(folder: Path, run: str = "tiny") -> list[str]:
    return [each.name for each in records(folder, run) if isinstance(each, EventRecord)]


def wait_until(is_met: Callable[[], object], what: str) -> None:
    """Waits for something that a run does."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_met():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def checkpoints(folder: Path, run: str = "tiny") -> list[Path]:
    return list_checkpoints(folder / "runs" / run / "checkpoints")


def is_same_state(ours: Path, theirs: Path, run: str = "tiny") -> bool:
    """Says whether the newest checkpoints of two projects hold the same bits."""
    mine, other = (open_checkpoint(checkpoints(folder, run)[-1]) for folder in (ours, theirs))
    assert (mine.step, mine.shapes(), mine.values) == (other.step, other.shapes(), other.values)
    return all(torch.equal(mine.read(name), other.read(name)) for name in mine.shapes())
