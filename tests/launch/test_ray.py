"""Runs on a real Ray of two or three nodes on this machine, as ``make ray`` starts it; and ranks of Ray Train."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched_runs import checkpoints, environment, events, make_project, paceline, starts, steps, wait_until

from paceline.launch.job import find_launch
from paceline.launch.ray_cluster import PLACES, RemoteWorker
from paceline.run.folder import is_in_use

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
ACTOR = f"ray::{RemoteWorker.__name__}"
LONG = ("train.steps=100000", "checkpoint.every_steps=10", "--on", "ray", "--detach")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two Ray nodes with two CPUs each."""
    pytest.importorskip("ray", reason="Ray is not installed: make ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def actors() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_run_trains_on_all_nodes_and_its_log_and_code_come_back(cluster: Any, tmp_path: Path) -> None:
    make_project(tmp_path)
    shown = paceline(tmp_path, "launch", "tiny.yaml", "--on", "ray", "--nodes", "2", "--dry-run")
    assert "placement group: STRICT_SPREAD, 2 bundles of" in shown.stdout, shown.stderr
    assert f"the Ray cluster is {cluster.address}" in shown.stderr
    done = paceline(tmp_path, "launch", "tiny.yaml", "--on", "ray", "--nodes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.world_size for each in starts(tmp_path)] == [2]
    assert steps(tmp_path)[-1] == 60
    assert "done   step 60" in done.stdout
    assert "exit code 0" in paceline(tmp_path, "launch", "status").stdout
    assert not actors()


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_dies_restarts_the_run_from_its_checkpoint(tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.05)
    assert paceline(tmp_path, "launch", "tiny.yaml", *LONG, "--nodes", "2").returncode == 0
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    told = [" ".join(process.cmdline()) for process in psutil.process_iter() if "paceline" in process.name()]
    assert not any("PACELINE_SECRET" in words for words in told)
    assert "on Ray node" in paceline(tmp_path, "launch", "status").stdout
    actors()[0].kill()
    wait_until(lambda: len(starts(tmp_path)) == 2, "a second start")
    before = steps(tmp_path)[-1]
    wait_until(lambda: steps(tmp_path)[-1] > before, "steps")
    assert paceline(tmp_path, "launch", "cancel", "tiny").returncode == 0
    done = paceline(tmp_path, "launch", "logs", "--follow")
    assert done.returncode == 75, done.stdout
    assert "(restart 1 of 3): all hosts start again from the newest checkpoint" in done.stdout
    assert checkpoints(tmp_path)
    assert not actors()


def test_a_run_goes_on_without_a_ray_node_that_is_lost_and_gives_up_without_restarts(
    cluster: Any, tmp_path: Path
) -> None:
    make_project(tmp_path, pause_s=0.05)
    assert paceline(tmp_path, "launch", "tiny.yaml", *LONG, "--nodes", "1:2").returncode == 0
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    (lost,) = cluster.worker_nodes
    assert lost.node_id[:8] in (Path(find_launch(tmp_path / "runs", "tiny").folder) / PLACES).read_text()
    cluster.remove_node(lost)
    wait_until(lambda: starts(tmp_path)[-1].world_size == 1, "a start with one host")
    before = steps(tmp_path)[-1]
    wait_until(lambda: steps(tmp_path)[-1] > before, "steps")
    assert paceline(tmp_path, "launch", "cancel", "tiny").returncode == 0
    assert paceline(tmp_path, "launch", "logs", "--follow").returncode == 75
    words = [*LONG, "recovery.max_restarts=0", "name=once"]
    assert paceline(tmp_path, "launch", "tiny.yaml", *words).returncode == 0
    wait_until(lambda: steps(tmp_path, "once"), "steps")
    actors()[0].kill()
    done = paceline(tmp_path, "launch", "logs", "once", "--follow")
    assert done.returncode == 1, done.stdout
    assert "was lost" in done.stdout


@pytest.mark.usefixtures("cluster")
def test_a_run_saves_and_leaves_when_the_process_that_holds_its_actors_is_killed(tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.05)
    words = [*LONG, "checkpoint.every_steps=100000", "--nodes", "2"]
    assert paceline(tmp_path, "launch", "tiny.yaml", *words).returncode == 0
    wait_until(lambda: len(steps(tmp_path)) > 5, "steps")
    found = [process for process in psutil.process_iter() if "paceline.launch.ray_hosts" in process.cmdline()[2:3]]
    (holder,) = [process for process in found if str(tmp_path) in process.cmdline()[-1]]
    holder.kill()
    wait_until(lambda: "preempted" in events(tmp_path), "a save")
    wait_until(lambda: not actors() and checkpoints(tmp_path), "the end of the actors")
    wait_until(lambda: not is_in_use(tmp_path / "runs" / "tiny"), "the end of the run")


@pytest.mark.usefixtures("cluster")
def test_what_cannot_run_is_refused_before_it_is_placed(tmp_path: Path) -> None:
    make_project(tmp_path)
    for words, told in [
        (["--nodes", "3"], "--nodes 3, and the Ray cluster"),
        (["--set", "cpus=64"], "has room for 0"),
        (["--set", "adress=x"], "did you mean address?"),
        (["--set", "address=127.0.0.1:1"], "no Ray cluster answers at address 127.0.0.1:1"),
    ]:
        done = paceline(tmp_path, "launch", "tiny.yaml", "--on", "ray", *words)
        assert done.returncode == 2, done.stdout + done.stderr
        assert told in done.stderr
        assert not list((tmp_path / "runs").glob("*"))
    refused = paceline(tmp_path, "launch", "tiny.yaml", "train.loss=slow_loss:none", "--on", "ray", "--nodes", "2")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "start again" not in refused.stdout + refused.stderr


@pytest.mark.usefixtures("cluster")
def test_an_actor_for_each_rank(tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.05)
    words = ["train.steps=400", "checkpoint.every_steps=20", "parallel.node_ranks=2", "--on", "ray", "--nodes", "2"]
    words += ["--set", "actor=rank", "--detach"]
    assert paceline(tmp_path, "launch", "tiny.yaml", *words).returncode == 0
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    assert [each.world_size for each in starts(tmp_path)] == [4]
    actors()[2].kill()
    wait_until(lambda: len(starts(tmp_path)) == 2, "a second start")
    (tmp_path / "pause").unlink()
    done = paceline(tmp_path, "launch", "logs", "--follow")
    assert done.returncode == 0, done.stdout
    assert steps(tmp_path)[-1] == 400


TRAIN = """
import os
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop():
    import paceline, torch
    from paceline.run.whereami import recognise

    around = recognise(os.environ)
    comm = paceline.connect()
    model = torch.nn.Linear(4, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    engine = paceline.parallelize(model, comm, strategy="ddp")
    engine(torch.full((2, 4), float(comm.rank + 1), dtype=torch.float64, device=comm.device)).sum().backward()
    gradient = next(engine.parameters()).grad.tolist()
    with open(f"rank-{comm.rank}", "w") as file:
        file.write(f"{around.launcher} {around.kind} {around.number} of {around.count}: {gradient}")


ray.init(address=os.environ["RAY_ADDRESS"])
where = os.getcwd()
scaling, config = ScalingConfig(num_workers=2), RunConfig(storage_path=where)
TorchTrainer(lambda: (os.chdir(where), loop()), scaling_config=scaling, run_config=config).fit()
"""


@pytest.mark.usefixtures("cluster")
def test_connect_joins_the_workers_of_ray_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    settings = environment(RAY_TRAIN_V2_ENABLED="1", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):  # the mean of the gradients 2 and 4
        told = (tmp_path / f"rank-{rank}").read_text()
        assert told == f"Ray Train rank {rank} of 2: [[3.0, 3.0, 3.0, 3.0]]"
