"""Runs on a real Slurm of four nodes, which ``make slurm`` starts on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_runs import (
    checkpoints,
    environment,
    events,
    is_same_state,
    make_project,
    paceline,
    starts,
    steps,
    wait_until,
)

from paceline.launch.job import find_launch
from paceline.launch.slurm import state

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    if "SLURM_CONF" not in os.environ:
        pytest.skip("no Slurm: make slurm starts one")
    yield
    slurm("scancel", "--user=root")
    wait_until(lambda: not slurm("squeue", "--noheader"), "jobs end")
    for node in ("n1", "n2", "n3", "n4"):
        if "down" in slurm("sinfo", "--noheader", f"--nodes={node}", "--format=%T"):
            slurm("scontrol", "update", f"nodename={node}", "state=resume")
    wait_until(lambda: slurm("sinfo", "--noheader", "--format=%T|%D").split() == ["idle|4"], "idle nodes")


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_run_trains_on_all_nodes_and_its_log_and_code_come_back(tmp_path: Path, nodes: int) -> None:
    make_project(tmp_path)
    done = paceline(tmp_path, "launch", "tiny.yaml", "--on", "slurm", "--nodes", str(nodes))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Slurm: host 0 of {nodes}, meeting at" in done.stdout
    assert [each.world_size for each in starts(tmp_path)] == [nodes]
    assert steps(tmp_path)[-1] == 60
    assert "exit code 0" in paceline(tmp_path, "launch", "status").stdout
    again = paceline(tmp_path, "launch", "tiny.yaml", "--on", "slurm", "--nodes", "2", "--dry-run")
    assert "name=tiny-2 " in again.stdout  # a new launch is a new run


def test_the_time_limit_saves_and_queues_again_and_the_bits_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    ours, theirs = make_project(tmp_path / "ours", pause_s=0.4), make_project(tmp_path / "theirs")
    words = ["tiny.yaml", "train.steps=400", "--on", "slurm", "--nodes", "2"]
    whole = paceline(theirs, "launch", *words)
    assert whole.returncode == 0, whole.stderr
    assert paceline(ours, "launch", *words, "--time", "2", "--set", "save_s=30", "--detach").returncode == 0
    wait_until(lambda: "preempted" in events(ours), "the signal before the limit")
    (ours / "pause").unlink()
    done = paceline(ours, "launch", "logs", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the time limit is near: the run saves and leaves" in done.stdout
    assert len(starts(ours)) > 1
    found = steps(ours)
    assert found == sorted(set(found))  # no step is trained twice
    assert found[-1] == 400
    assert is_same_state(ours, theirs)


def test_a_job_is_queued_again_only_so_often(tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.05)
    words = ["tiny.yaml", "train.steps=100000", "--on", "slurm", "--nodes", "2", "--max-requeues", "0", "--detach"]
    assert paceline(tmp_path, "launch", *words).returncode == 0
    job = find_launch(tmp_path / "runs", "tiny")
    wait_until(lambda: steps(tmp_path), "steps")
    slurm("scancel", "--signal=USR1", "--batch", job.id)  # as Slurm does before the limit
    assert paceline(tmp_path, "launch", "logs", "--follow").returncode == 75
    assert "not queued again: it was started 1 times" in job.log.read_text()
    assert checkpoints(tmp_path)


def test_a_node_that_goes_down_is_replaced_by_another(tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.1)
    words = ["tiny.yaml", "train.steps=250", "checkpoint.every_steps=10", "--on", "slurm", "--nodes", "2", "--detach"]
    assert paceline(tmp_path, "launch", *words).returncode == 0
    job = find_launch(tmp_path / "runs", "tiny")
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    slurm("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    done = paceline(tmp_path, "launch", "logs", "--follow")
    assert done.returncode == 0, done.stdout
    assert len(starts(tmp_path)) == 2
    assert steps(tmp_path)[-1] == 250
    assert "n2" not in slurm("scontrol", "show", "job", "--oneliner", job.id).partition(" NodeList=")[2].split()[0]


def test_a_cancelled_run_saves_and_stays_cancelled(tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.05)
    words = ["tiny.yaml", "train.steps=100000", "checkpoint.every_steps=0", "--on", "slurm", "--nodes", "2", "--detach"]
    assert paceline(tmp_path, "launch", *words[:2], *words[3:]).returncode == 0
    wait_until(lambda: steps(tmp_path), "steps")
    assert paceline(tmp_path, "launch", "cancel", "tiny").returncode == 0
    job = find_launch(tmp_path / "runs", "tiny")
    wait_until(lambda: state(job).kind == "ended", "its end")
    assert "cancelled" in state(job).words
    assert "preempted" in events(tmp_path)
    assert checkpoints(tmp_path)
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--queue", "mian"],
            "Slurm has no queue named mian\n  its queues (partitions) are main\n  did you mean main?",
        ),
        (["--nodes", "5"], "--nodes 5, and queue main has 4 such nodes"),
        (
            ["--gpus-per-node", "2", "parallel.device=auto", "parallel.node_ranks=null"],
            "with 2 GPUs, and queue main has 0",
        ),
        (["model.hidden_dim=100000000"], "out of memory"),
        (["--set", "qos=none-such\nx"], "--set with a line break"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_queued(tmp_path: Path, words: list[str], told: str) -> None:
    make_project(tmp_path)
    done = paceline(tmp_path, "launch", "tiny.yaml", "--on", "slurm", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert not list((tmp_path / "runs").glob("*"))
    assert not slurm("squeue", "--noheader")


def test_what_sbatch_refuses_leaves_nothing(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = paceline(tmp_path, "launch", "tiny.yaml", "--on", "slurm", "--set", "dependency=afterok:1:what")
    assert (done.returncode, "sbatch: " in done.stderr) == (1, True), done.stderr
    assert not list((tmp_path / "runs").glob(".launches/*"))


def test_each_task_of_an_array_is_a_run(tmp_path: Path) -> None:
    make_project(tmp_path)
    words = ["tiny.yaml", "train.seed={task}", "--on", "slurm", "--nodes", "1", "--array", "0-1"]
    assert paceline(tmp_path, "launch", *words).returncode == 0
    job = find_launch(tmp_path / "runs", "tiny")
    wait_until(lambda: state(job).kind == "ended", "the end of both")
    assert state(job).code == 0
    for task in range(2):
        assert steps(tmp_path, f"tiny-{task}")[-1] == 60
        assert f"seed: {task}" in (tmp_path / "runs" / f"tiny-{task}" / "config.yaml").read_text()


def test_tasks_of_srun_are_ranks_of_a_run_and_of_a_loop(tmp_path: Path) -> None:
    make_project(tmp_path)
    (tmp_path / "loop.py").write_text(
        "import paceline, torch\ncomm = paceline.connect()\nx = torch.ones(1)\ncomm.all_reduce(x).wait()\n"
        "print('rank', comm.rank, 'sum', int(x))\n"
    )
    srun = ["srun", "--nodes=2", "--ntasks=4", "--overcommit"]
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 400}
    # Names of nodes lead nowhere on this cluster.
    meeting = {"MASTER_ADDR": "127.0.0.1"}
    options["env"] = environment(**meeting)
    loop = subprocess.run([*srun, sys.executable, "loop.py"], check=False, **options)
    assert sorted(line for line in loop.stdout.splitlines() if "rank" in line) == [
        f"rank {rank} sum 4" for rank in range(4)
    ], loop.stderr
    words = [sys.executable, "-m", "paceline", "train", "tiny.yaml", "parallel.node_ranks=2", "train.steps=5"]
    run = subprocess.run([*srun, *words], check=False, **options)
    assert run.returncode == 0, run.stderr
    assert starts(tmp_path)[0].world_size == 4
    alone = subprocess.run(["srun", "--nodes=1", "--ntasks=1", *words, "name=alone"], check=False, **options)
    assert alone.returncode == 0, alone.stderr
