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
from free_ports import free_port

from paceline.health.exit_codes import HUNG, PREEMPTED
from paceline.records.records import EndRecord, EventRecord, Record, RunRecord, StepRecord, read_records
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
checkpoint: {every_steps: 100, memory: {every_steps: 10}}
recovery: {on_hang: stop}
monitor: {tensorboard: false, console: false, hang_s: HANG_S, hang_setup_s: 100}
"""
STEPS, LIMIT_S, LATE_S = 400, 2.0, 3.0


def start(
    folder: Path, steps: int, hang_s: float, *options: str, host: str = "h0", jumps: bool = True
) -> subprocess.Popen[str]:
    (folder / "tiny.yaml").write_text(CONFIG.replace("STEPS", str(steps)).replace("HANG_S", str(hang_s)))
    clock = folder / "clock"
    clock.mkdir(exist_ok=True)
    (clock / "sitecustomize.py").write_text(JUMPING_CLOCK)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PACELINE_HOST": host}
    if jumps:
        environment["PYTHONPATH"] = os.pathsep.join([str(clock), environment.get("PYTHONPATH", "")])
    # Not from the fork server, which has loaded its clock already.
    command = ["env", sys.executable, "-m", "paceline", "train", "tiny.yaml", *options]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def records(folder: Path) -> list[Record]:
    path = folder / "runs" / "tiny" / "records" / "rank-0.jsonl"
    return list(read_records(path)) if path.is_file() else []


def events(folder: Path, name: str) -> list[EventRecord]:
    return [each for each in records(folder) if isinstance(each, EventRecord) and each.name == name]


def wait_until(is_met: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    while not is_met():
        assert all(each.poll() is None for each in processes)
        time.sleep(0.3)  # the records grow long


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
        found = list(read_records(folder / "records" / f"rank-{rank}.jsonl"))
        assert [each.step for each in found if isinstance(each, StepRecord)] == list(range(1, STEPS + 1))
        times = [each.time for each in found if isinstance(each, StepRecord)]
        assert max(times) - min(times) > 24 * 3600  # the clock has jumped under it
        (end,) = (each for each in found if isinstance(each, EndRecord))
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


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_run_recovers_from_memory_and_is_preempted_while_its_clock_jumps(tmp_path: Path) -> None:
    with start(tmp_path, 10**6, 20.0) as process:
        wait_until(lambda: len(events(tmp_path, "snapshot")) >= 2, process)
        os.kill(noted_processes(tmp_path / "runs" / "tiny")[1], signal.SIGKILL)
        wait_until(lambda: events(tmp_path, "resume"), process)
        (resumed,) = events(tmp_path, "resume")
        assert resumed.step > 0
        wait_until(lambda: events(tmp_path, "snapshot")[-1].step > resumed.step, process)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate()
    assert process.returncode == PREEMPTED, told
    found = records(tmp_path)
    assert isinstance(found[-1], EndRecord)
    assert found[-1].status == "stopped"
    steps = [each.step for each in found if isinstance(each, StepRecord)]
    again = steps.index(resumed.step + 1, steps.index(resumed.step + 1) + 1)
    assert steps[again:] == list(range(resumed.step + 1, steps[-1] + 1))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_host_whose_clock_jumps_stays_in_its_run(tmp_path: Path) -> None:
    """By hours, forward and back, every 0.4 s: 5 s without a sign of life would be told."""
    hosts = ["parallel.ranks=auto", "--nnodes", "1:2", "--node-ranks", "1", "--rdzv", f"127.0.0.1:{free_port()}"]

    def worlds() -> list[int]:
        return [each.world_size for each in records(tmp_path) if isinstance(each, RunRecord)]

    with start(tmp_path, 10**6, 20.0, *hosts, host="h0", jumps=False) as first:
        wait_until((tmp_path / "runs" / "tiny" / "config.yaml").is_file, first)
        with start(tmp_path, 10**6, 20.0, *hosts, host="h1") as second:
            wait_until(lambda: worlds()[-1:] == [2], first, second)
            known, until = worlds(), time.monotonic() + 8.0
            wait_until(lambda: time.monotonic() > until, first, second)
            assert worlds() == known
            number = len(events(tmp_path, "snapshot"))
            wait_until(lambda: len(events(tmp_path, "snapshot")) > number, first, second)
            first.send_signal(signal.SIGTERM)
            told = [each.communicate()[1] for each in (first, second)]
    assert [first.returncode, second.returncode] == [PREEMPTED, PREEMPTED], told
    assert not any("is gone" in each for each in told), told
