"""Launched hosts whose network splits, whose clocks differ, or whose link is slow: ``make hosts`` runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from host_network import HostNetwork
from launched_runs import checkpoints, is_same_state, make_project, starts, steps, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
# Python imports it first in every process; that of one host goes ahead by seconds.
CLOCK = """
import socket, time

if socket.gethostname() == "h1":
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + 7.0
    time.time_ns = lambda: real_ns() + 7 * 10**9
"""
SLOW_BITS = 8_000_000


def test_a_link_that_goes_down_is_told_by_both_sides_and_the_run_goes_on_when_it_is_mended(
    four_hosts: HostNetwork, tmp_path: Path
) -> None:
    make_project(tmp_path, pause_s=0.05)
    done = four_hosts.launch(tmp_path, "train.steps=100000", "checkpoint.every_steps=10", "--detach")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    log = tmp_path / "runs" / ".launches" / "tiny" / "log"
    four_hosts.cut(1)
    wait_until(lambda: "h1 (nothing was heard of it for 5 s) is gone" in log.read_text(), "that h1 is gone")
    four_hosts.mend(1)
    wait_until(lambda: len(starts(tmp_path)) == 2 and len(steps(tmp_path)) > 20, "steps after the link was mended")
    told = log.read_text()
    assert "host h1 does not reach the launcher where the hosts meet: the control server at tcp:10.77.0.2:" in told
    assert "comes back" in told
    assert "could not be started" not in told
    assert four_hosts.paceline(tmp_path, "launch", "cancel", "tiny").returncode == 0
    assert four_hosts.paceline(tmp_path, "launch", "logs", "--follow").returncode == 75


def test_ports_that_are_shut_are_told_with_the_pair_and_the_direction(four_hosts: HostNetwork, tmp_path: Path) -> None:
    if shutil.which("iptables") is None:
        pytest.skip("no iptables: apt-get install iptables")
    make_project(tmp_path)
    closed = ["ip", "netns", "exec", four_hosts.network.host(2), "iptables", "-I", "INPUT", "-p", "tcp", "--syn"]
    subprocess.run([*closed, "-s", "10.77.1.2", "--dport", "32768:60999", "-j", "REJECT"], check=True)
    done = four_hosts.launch(tmp_path, hosts="h0,h1,h2")
    assert done.returncode == 2, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert "h1 -> h2 (10.77.2.2) ports " in told
    assert all(f"{pair} (10.77" not in told for pair in ("h0 -> h1", "h1 -> h0", "h2 -> h1", "h0 -> h2", "h2 -> h0"))
    four_hosts.launch(tmp_path, "--nodes", "2:3", hosts="h0,h1,h2")  # goes on without the last that came of the pair
    assert {each.world_size for each in starts(tmp_path, "tiny-2") or starts(tmp_path)} == {2}


def test_clocks_that_differ_by_seconds_change_nothing(
    four_hosts: HostNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make_project(tmp_path / "ours"), make_project(tmp_path / "theirs")
    assert four_hosts.launch(theirs).returncode == 0
    (ours / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ours), os.environ.get("PYTHONPATH", "")]))
    done = four_hosts.launch(ours)
    assert done.returncode == 0, done.stdout + done.stderr
    began = {rank: starts(ours, rank=rank)[0] for rank in range(2)}
    ahead = {each.host: each.time for each in began.values()}
    assert 5.0 < ahead["h1"] - ahead["h0"] < 30.0  # the clocks did differ
    assert steps(ours)[-1] == 60
    assert len(began) == len(starts(ours)) + 1  # one start each
    assert not (ours / "runs" / "tiny" / "verdict.json").exists()
    assert is_same_state(ours, theirs)


def test_a_slow_link_is_named_as_such(four_hosts: HostNetwork, tmp_path: Path) -> None:
    make_project(tmp_path)
    four_hosts.network.shape(1, SLOW_BITS)
    done = four_hosts.launch(tmp_path, "train.steps=40", "checkpoint.every_steps=40", "model.hidden_dim=512")
    assert done.returncode == 0, done.stdout + done.stderr
    report = four_hosts.paceline(tmp_path, "report", "runs/tiny", "--json")
    limits = json.loads(report.stdout)["limits"]
    assert limits["what"] == "link", limits
    assert "a slow link" in limits["sentence"]
