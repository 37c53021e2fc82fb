"""How a process was started, by its environment: each launcher's own variables, and those that are not enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import CommunicationError, ConfigError, UsageError
from paceline.run.own_loop import connect
from paceline.run.whereami import Surroundings, first_host, recognise, tasks_of_node

CONFIG = """
name: tiny
model: {kind: mlp}
data: {kind: digits}
train: {steps: 1, global_batch: 6}
parallel: {device: cpu, ranks: 3}
"""
SLURM = {
    "SLURM_JOB_ID": "417",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
MASTER = {"MASTER_ADDR": "host1", "MASTER_PORT": "29500"}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
TASKS = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_PROCID": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "launcher", "found"),
    [
        ({}, "no launcher", ("alone", 0, 1)),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "1"}, "no launcher", ("alone", 0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", **MASTER}, "torchrun", ("rank", 2, 4)),
        ({"RANK": "2", "WORLD_SIZE": "4", **MASTER, **SLURM}, "the environment", ("rank", 2, 4)),
        ({"RANK": "2", "WORLD_SIZE": "4", "NODE_RANK": "1", "RAY_JOB_ID": "1", **MASTER}, "Ray Train", ("rank", 2, 4)),
        ({"RAY_JOB_ID": "1", **SLURM}, "no launcher", ("alone", 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "unix:/tmp/s", "MASTER_PORT": "0"}, "the", ("rank", 0, 2)),
        ({"NODE_RANK": "1", "WORLD_SIZE": "2", **MASTER}, "the environment", ("host", 1, 2)),
        ({"NODE_RANK": "1", "NNODES": "3", "WORLD_SIZE": "24", **MASTER}, "the environment", ("host", 1, 3)),
        ({"NODE_RANK": "0", "NNODES": "1"}, "the environment", ("alone", 0, 1)),
        ({"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0", "RANK": "2"}, "Kube", ("host", 2, 4)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, "Kubeflow", ("alone", 0, 1)),
        ({"JOB_COMPLETION_INDEX": "1", "NNODES": "2", **MASTER}, "Kubernetes", ("host", 1, 2)),
        ({**MPI, **MASTER}, "MPI", ("rank", 3, 4)),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "MPI", ("rank", 3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", **MASTER, **SLURM}, "MPI", ("rank", 0, 2)),
        (SLURM, "Slurm", ("host", 1, 2)),
        ({**SLURM, **TASKS}, "Slurm", ("rank", 4, 5)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "Slurm", ("alone", 0, 1)),
        ({"SLURM_JOB_ID": "417", "SLURM_PROCID": "0"}, "Slurm", ("alone", 0, 1)),
        ({**SLURM, "PACELINE_LAUNCHER": "none"}, "PACELINE_LAUNCHER=none", ("alone", 0, 1)),
    ],
)
def test_every_launcher_is_recognised(environment: dict[str, str], launcher: str, found: tuple[str, int, int]) -> None:
    around = recognise(environment)
    assert around.launcher.startswith(launcher)
    assert (around.kind, around.number, around.count) == found
    if around.kind != "alone":
        assert around.address
        assert f"{around.number} of {around.count}, meeting at {around.address}:{around.port}" in str(around)


def test_the_first_node_of_a_job_is_where_its_tasks_meet() -> None:
    around = recognise(SLURM)
    assert (around.address, around.host_ranks) == ("gpu07", None)
    assert around.port == recognise({**SLURM, "SLURM_PROCID": "0"}).port  # all find the same one
    assert around.port != recognise({**SLURM, "SLURM_JOB_ID": "418"}).port
    assert recognise({**SLURM, **MASTER}).endpoint == "host1:29500"
    assert recognise({**SLURM, **TASKS}).host_ranks == 2
    assert first_host("gpu[07-09,12],login") == "gpu07"
    assert first_host("r[1-2]n[3,4]") == "r1n3"
    assert first_host("a,b") == "a"
    assert [tasks_of_node("2(x2),1", node) for node in range(4)] == [2, 2, 1, None]


@pytest.mark.parametrize(
    ("environment", "named_by"),
    [
        ({"NODE_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR = "),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "no.such.host.invalid"}, "PET_MASTER_ADDR = "),
        ({**SLURM, "SLURM_STEP_NODELIST": "no.such.host.invalid"}, "SLURM_STEP_NODELIST = "),
    ],
)
def test_a_host_that_is_not_known_is_told_with_the_variable_that_named_it(
    environment: dict[str, str], named_by: str
) -> None:
    with pytest.raises(UsageError) as refused:
        recognise(environment).own_address()
    assert str(refused.value).startswith(f"{named_by}no.such.host.invalid: ")
    assert "--rdzv" not in str(refused.value)


def test_a_rank_gets_the_variables_of_torch() -> None:
    task = recognise({**SLURM, **TASKS}).rank_variables()
    numbers = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert task == {**numbers, "MASTER_ADDR": "gpu07", "MASTER_PORT": task["MASTER_PORT"]}
    host = recognise({"NODE_RANK": "1", "WORLD_SIZE": "2", **MASTER}).rank_variables()
    assert host == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **MASTER}
    assert Surroundings(launcher="no launcher").rank_variables() == {}


def test_hosts_that_may_come_and_go() -> None:
    environment = {"PET_NNODES": "2:4", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "job-0:1234"}
    nodes = recognise({**environment, "PET_NPROC_PER_NODE": "8"})
    assert (nodes.least, nodes.count, nodes.endpoint, nodes.host_ranks) == (2, 4, "job-0:1234", 8)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"MASTER_ADDR": "host1", "WORLD_SIZE": "2"}, ["neither RANK nor NODE_RANK is set"]),
        ({"MASTER_ADDR": "host1"}, ["MASTER_ADDR=host1, and neither"]),
        ({"RANK": "1"}, ["WORLD_SIZE is not set", "MASTER_ADDR is not set", "MASTER_PORT is not set"]),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, ["RANK = 2 with WORLD_SIZE = 2"]),
        ({"RANK": "x", "WORLD_SIZE": "2", **MASTER}, ["RANK = x"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "70000"}, ["MASTER_PORT = 70000"]),
        ({"NNODES": "2"}, ["NNODES=2, and neither RANK nor NODE_RANK"]),
        ({"NODE_RANK": "1"}, ["neither NNODES nor WORLD_SIZE", "MASTER_ADDR is not set"]),
        ({"NODE_RANK": "4", "NNODES": "2:3", **MASTER}, ["NODE_RANK = 4 with NNODES = 3"]),
        ({"JOB_COMPLETION_INDEX": "0"}, ["neither NNODES nor WORLD_SIZE", "MASTER_ADDR is not set", "LAUNCHER=none"]),
        ({"PET_NNODES": "3:2", "PET_NODE_RANK": "0"}, ["PET_NNODES = 3:2"]),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "h"}, ["PET_NODE_RANK is not set"]),
        (MPI, ["mpirun -x MASTER_ADDR=HOST"]),
        ({"SLURM_JOB_ID": "417", "SLURM_JOB_NUM_NODES": "2"}, ["Slurm job 417 has 2 nodes", "srun paceline train"]),
        ({"PACELINE_LAUNCHER": "slurm"}, ["PACELINE_LAUNCHER = slurm"]),
    ],
)
def test_what_is_missing_or_contradictory_is_refused_all_at_once(environment: dict[str, str], told: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        recognise(environment)
    for text in told:
        assert text in str(refused.value)


def test_a_loop_of_ones_own_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(CommunicationError, match="neither NNODES nor WORLD_SIZE"):
        connect()
    for name, value in {"NNODES": "2", "LOCAL_WORLD_SIZE": "4", **MASTER}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match="4 ranks on each host, and this process is one"):
        connect()


def test_one_of_two_hosts_does_not_train_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    hosts = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "1", "WORLD_SIZE": "2"}
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "tiny.yaml"],
        cwd=tmp_path,
        env={**environment, **hosts},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "parallel.ranks = 3 on 2 hosts (the environment: host 1 of 2" in done.stderr
    assert not (tmp_path / "runs").exists()
