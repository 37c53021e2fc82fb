"""The clock on the wall jumps by hours while a run trains, in its launcher and its ranks: nothing goes by it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.health.exit_codes import HUNG
from paceline.records.records import EndRecord, StepRecord, read_records
from paceline.run.notes import noted_processes, read_progress

# Python imports it first in every process of the run; the clock of all of them jumps at the same moments.
JUMPING_CLOCK = """
import time

real, real_ns = time.time, time.time_ns

def ahead():
    return (0, 6 * 3600, -30 * 3600, 90 * 24 * 3600)[int(time.monotonic() / 0.4) % 4]

time.time = lambda: real() + ahead()
time.time_ns = lambda: real_ns() + ahead() * 10**9
"""
CONFIG = """
name: tiny
model: {kind: mlp, hidden_dim: 64}
data: {kind: synthetic_classification, samples: 256, features: 16, classes: 4}
train: {steps: STEPS, global_batch: 16, eval_every: 100}
parallel: {ranks: 2, device: cpu, threads: 1}
checkpoint: {every_steps: 100}
recovery: {on_hang: stop}
monitor: {tensorboard: false, console: false, hang_s: HANG_S, hang_setup_s: 100}
"""
STEPS, LIMIT_S, LATE_S = 400, 2.0, 3.0


def start(folder: Path, steps: int, hang_s: float) -> subprocess.Popen[str]:
    (folder / "tiny.yaml").write_text(CONFIG.replace("STEPS", str(steps)).replace("HANG_S", str(hang_s)))
    (folder / "sitecustomize.py").write_text(JUMPING_CLOCK)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    # Not from the fork server, which has loaded its clock already.
    command = ["env", sys.executable, "-m", "paceline", "train", "tiny.yaml"]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_run_goes_on_while_its_clock_jumps(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    began = time.monotonic()
    with start(tmp_path, STEPS, hang_s=20) as process:
        _, told = process.communicate()
    assert process.returncode == 0, told
    record_property("faults", int((time.monotonic() - began) / 0.4))
    folder = tmp_path / "runs" / "tiny"
    assert not (folder / "verdict.txt").exists()
    for rank in range(2):
        records = list(read_records(folder / "records" / f"rank-{rank}.jsonl"))
        assert [each.step for each in records if isinstance(each, StepRecord)] == list(range(1, STEPS + 1))
        times = [each.time for each in records if isinstance(each, StepRecord)]
        assert max(times) - min(times) > 24 * 3600  # the clock has jumped under it
        (end,) = (each for each in records if isinstance(each, EndRecord))
        assert (end.status, end.step) == ("done", STEPS)
        assert 0.0 < end.seconds < time.monotonic() - began


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_stopped_rank_is_told_in_time_while_the_clock_jumps(tmp_path: Path, guilty: int) -> None:
    folder = tmp_path / "runs" / "tiny"
    with start(tmp_path, 10**6, LIMIT_S) as process:
        while not read_progress(folder) or not all(each.last_step > 50 for each in read_progress(folder).values()):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(noted_processes(folder)[guilty], signal.SIGSTOP)
        stopped = time.monotonic()
        while not (folder / "verdict.json").exists():
            assert process.poll() is None
            time.sleep(0.01)
        seconds = time.monotonic() - stopped
        _, told = process.communicate()
    assert process.returncode == HUNG, told
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["kind"], verdict["ranks"]) == ("stopped", [guilty]), told
    assert seconds < LIMIT_S + LATE_S, told
