"""Ranks that are stopped at random moments: each time the right rank and cause, in time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.health.exit_codes import HUNG
from paceline.run.notes import noted_processes

CONFIG = """
name: tiny
model: {kind: mlp, hidden_dim: 64}
data: {kind: synthetic_classification, samples: 256, features: 16, classes: 4}
train: {steps: 1000000, global_batch: 16, eval_every: 7}
parallel: {ranks: 2, device: cpu, threads: 1, strategy: STRATEGY}
comm: {backend: BACKEND}
checkpoint: {every_steps: 5, asynchronous: IN_BACKGROUND}
recovery: {on_hang: stop}
monitor: {tensorboard: false, console: false, hang_s: 2, hang_setup_s: 100}
"""
LIMIT_S, LATE_S = 2.0, 3.0
LONGEST_S = 4.0  # after the first rank has shown up


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_is_stopped_at_a_random_moment_is_told(tmp_path: Path, seed: int) -> None:
    """In set-up, steps, evaluations and checkpoints, as it comes."""
    draw = random.Random(f"stopped {seed}")
    text = CONFIG.replace("STRATEGY", draw.choice(("ddp", "zero2", "fsdp")))
    text = text.replace("BACKEND", draw.choice(("gloo", "shared_memory")))
    (tmp_path / "tiny.yaml").write_text(text.replace("IN_BACKGROUND", draw.choice(("true", "false"))))
    folder, guilty = tmp_path / "runs" / "tiny", draw.randrange(2)
    command = [sys.executable, "-m", "paceline", "train", "tiny.yaml"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while len(noted_processes(folder)) < 2:
            time.sleep(0.01)
        time.sleep(draw.random() * LONGEST_S)
        os.kill(noted_processes(folder)[guilty], signal.SIGSTOP)
        stopped = time.time()
        _, told = process.communicate()
    assert process.returncode == HUNG, told
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["kind"], verdict["ranks"]) == ("stopped", [guilty]), told
    assert f"rank {guilty} is stopped (SIGSTOP)" in told
    assert f"its log is runs/tiny/logs/rank-{guilty}.log" in told
    assert "network" not in told
    assert verdict["time"] - stopped < LIMIT_S + LATE_S, told
    print(f"{verdict['time'] - stopped:.1f} s: {verdict['sentence']}")
