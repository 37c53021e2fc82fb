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

from paceline.health.exit_codes import FAILED, HUNG
from paceline.run.notes import noted_processes, read_progress

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


FREEZERS = {"freezer": ("freezer.state", "FROZEN", "THAWED"), "unified": ("cgroup.freeze", "1", "0")}
USER_CODE = """
import os
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(16, 4)
        self.calls, self.kept = 0, []
    def forward(self, values):
        self.calls += self.training
        if self.calls == 8 and os.environ["RANK"] == "1":
            while True:
                self.kept.append(open(os.devnull))
        return super().forward(values)
"""


def start(folder: Path, config: str, *before: str) -> subprocess.Popen[str]:
    """Starts a run of a config, behind the words of another command."""
    (folder / "tiny.yaml").write_text(config)
    command = [*before, sys.executable, "-m", "paceline", "train", "tiny.yaml"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def make_config(strategy: str = "ddp", backend: str = "auto", in_background: str = "false") -> str:
    text = CONFIG.replace("STRATEGY", strategy).replace("BACKEND", backend)
    return text.replace("IN_BACKGROUND", in_background)


def check_stopped(folder: Path, process: subprocess.Popen[str], guilty: int, cause: str, stopped: float) -> None:
    """Waits for the end of a run, and sees that it is told right and in time."""
    _, told = process.communicate()
    assert process.returncode == HUNG, told
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["kind"], verdict["ranks"]) == ("stopped", [guilty]), told
    assert f"rank {guilty} is {cause}" in told
    assert f"its log is runs/tiny/logs/rank-{guilty}.log" in told
    assert "network" not in told
    assert verdict["time"] - stopped < LIMIT_S + LATE_S, told
    print(f"{verdict['time'] - stopped:.1f} s: {verdict['sentence']}")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_is_stopped_at_a_random_moment_is_told(tmp_path: Path, seed: int) -> None:
    """In set-up, steps, evaluations and checkpoints, as it comes."""
    draw = random.Random(f"stopped {seed}")
    config = make_config(
        draw.choice(("ddp", "zero2", "fsdp")), draw.choice(("gloo", "shared_memory")), draw.choice(("true", "false"))
    )
    folder, guilty = tmp_path / "runs" / "tiny", draw.randrange(2)
    with start(tmp_path, config) as process:
        while len(noted_processes(folder)) < 2:
            time.sleep(0.01)
        time.sleep(draw.random() * LONGEST_S)
        os.kill(noted_processes(folder)[guilty], signal.SIGSTOP)
        check_stopped(folder, process, guilty, "stopped (SIGSTOP)", time.time())


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", list(FREEZERS))
def test_a_rank_whose_cgroup_is_frozen_is_told(tmp_path: Path, kind: str) -> None:
    name, frozen, thawed = FREEZERS[kind]
    group, folder = Path("/sys/fs/cgroup") / kind / f"paceline-run-{os.getpid()}", tmp_path / "runs" / "tiny"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("cgroups cannot be written here")
    try:
        with start(tmp_path, make_config()) as process:
            while not all(each.last_step > 5 for each in read_progress(folder).values()) or not read_progress(folder):
                time.sleep(0.01)
            (group / "cgroup.procs").write_text(str(noted_processes(folder)[1]))
            (group / name).write_text(frozen)
            check_stopped(folder, process, 1, f"frozen (cgroup /{group.name})", time.time())
    finally:
        (group / name).write_text(thawed)
        while (group / "cgroup.procs").read_text():
            time.sleep(0.01)
        group.rmdir()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_rank_that_can_open_no_more_files_is_told(tmp_path: Path) -> None:
    (tmp_path / "user_code.py").write_text(USER_CODE)
    config = make_config().replace("{kind: mlp, hidden_dim: 64}", '{kind: factory, factory: "user_code:Net"}')
    # To open files until none is left takes a busy machine seconds, which are no hang.
    config = config.replace("on_hang: stop", "max_restarts: 0").replace("hang_s: 2", "hang_s: 30")
    assert "hang_s: 30" in config
    with start(tmp_path, config) as process:
        _, told = process.communicate()
    assert process.returncode == FAILED, told
    assert "rank 1 failed: OSError: [Errno 24] Too many open files" in told
    assert "no more files can be opened" in told
    assert "its log is runs/tiny/logs/rank-1.log" in told


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "code"), [("auto", 0), ("shared_memory", FAILED)])
def test_without_room_in_shared_memory_ranks_say_so_or_do_without(tmp_path: Path, backend: str, code: int) -> None:
    full = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", full, "sh", "true"], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    config = make_config(backend=backend).replace("steps: 1000000", "steps: 20")
    with start(tmp_path, config, "unshare", "-m", "sh", "-c", full, "sh") as process:
        _, told = process.communicate()
    assert process.returncode == code, told
    assert code == 0 or ("/dev/shm" in told or "shared memory" in told), told
    print(told)
