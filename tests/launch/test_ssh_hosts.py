"""Runs on several hosts through ssh: network namespaces with real sshds, as ``make hosts`` runs them."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from host_network import HostNetwork
from launched_runs import checkpoints, environment, is_same_state, make_project, starts, steps, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]


def test_ranks_on_listed_hosts_train_what_one_host_would(four_hosts: HostNetwork, tmp_path: Path) -> None:
    ours, theirs = make_project(tmp_path / "ours"), make_project(tmp_path / "theirs")
    done = four_hosts.launch(ours, "train.steps=30", hosts="h0,h1,h2,h3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the hosts meet at 10.77.0.2:" in done.stderr
    assert starts(ours)[0].world_size == 4
    words = ["parallel.ranks=4", "parallel.node_ranks=null", "comm.backend=gloo", "train.steps=30"]
    assert four_hosts.paceline(theirs, "train", "tiny.yaml", *words).returncode == 0
    assert is_same_state(ours, theirs)


def test_a_host_is_lost_and_one_is_added(four_hosts: HostNetwork, tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.1)
    four_hosts.cut(3)
    words = ["train.steps=100000", "checkpoint.every_steps=10", "--nodes", "2:4", "--detach"]
    done = four_hosts.launch(tmp_path, *words, hosts="h0,h1,h2,h3")
    assert done.returncode == 0, done.stderr
    assert "h3 does not answer" in done.stderr
    wait_until(lambda: any(each.world_size == 3 for each in starts(tmp_path)) and checkpoints(tmp_path), "three hosts")
    four_hosts.cut(2)
    wait_until(lambda: starts(tmp_path)[-1].world_size == 2, "two hosts")
    four_hosts.mend(3)
    wait_until(lambda: starts(tmp_path)[-1].world_size == 3 and len(starts(tmp_path)) > 2, "a host that was added")
    before = steps(tmp_path)[-1]
    wait_until(lambda: steps(tmp_path)[-1] > before, "steps")
    assert four_hosts.paceline(tmp_path, "launch", "cancel", "tiny").returncode == 0
    assert four_hosts.paceline(tmp_path, "launch", "logs", "--follow").returncode == 75


# The last host has another file system where the others have the project.
@pytest.mark.parametrize(
    "four_hosts",
    ["mkdir -p {folder}/project && mount -t tmpfs none {folder}/project && touch {folder}/project/tiny.yaml"],
    indirect=True,
)
def test_what_is_wrong_with_hosts_is_told_with_their_names(four_hosts: HostNetwork, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    done = four_hosts.launch(project, hosts="h0,h3")
    assert done.returncode == 2
    assert f"host h3 does not have {project}/tiny.yaml" in done.stderr
    assert f"host h3 does not see {project}/runs of host h0" in done.stderr
    four_hosts.cut(1)
    done = four_hosts.launch(project)
    assert done.returncode == 2
    assert "host h1 does not answer: ssh: connect to host 10.77.1.2" in done.stderr
    words = ["--gpus-per-node", "2", "parallel.device=auto", "parallel.node_ranks=null", "--port", "22"]
    done = four_hosts.launch(project, *words, hosts="h0,h2")
    assert done.returncode == 2
    assert "host h2 has 0 GPUs, and --gpus-per-node is 2" in done.stderr
    assert "host h0 cannot listen on 10.77.0.2:22: Address already in use" in done.stderr
    assert not list((project / "runs").glob("*"))


@pytest.mark.parametrize(
    "four_hosts", ["mkdir -p {folder}/project && mount -t tmpfs none {folder}/project"], indirect=True
)
def test_launchers_that_do_not_share_the_folder_save_nothing(four_hosts: HostNetwork, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    command = [sys.executable, "-m", "paceline", "train", "tiny.yaml", "--nnodes", "2", "--rdzv", "10.77.0.2:29400"]
    settings = environment(PACELINE_SECRET="0123456789abcdef0123456789abcdef")
    mount = f"mount -t tmpfs none {project} && cp {tmp_path}/copy.yaml {project}/tiny.yaml && cd {project} && "
    (tmp_path / "copy.yaml").write_text((project / "tiny.yaml").read_text().replace(', loss: "slow_loss:loss"', ""))
    (project / "tiny.yaml").write_text((tmp_path / "copy.yaml").read_text())
    with contextlib.ExitStack() as stack:
        started = []
        for host, before in ((0, ""), (3, mount)):
            words = [*four_hosts.on(host), "sh", "-c", f"{before}exec {shlex.join(command)}"]
            log = stack.enter_context((tmp_path / f"log-{host}").open("wb"))
            process = subprocess.Popen(words, cwd=project, env=settings, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        codes = [process.wait(400) for process in started]
    logs = [(tmp_path / f"log-{host}").read_text() for host in (0, 3)]
    assert 0 not in codes
    assert any(f"does not see {project}/runs/tiny of host" in text for text in logs), logs
    assert not checkpoints(project)
